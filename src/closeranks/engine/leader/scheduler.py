"""What runs in the next step: admission, chunked prefill, continuous batching, retract, requests that run alone.

Rules:

- Decode rows first: every request that can draw a token has a row in every step. Then prefill, in order of admission,
  up to `chunk` tokens in all.
- Admission is first come, first served, without overtaking: a large request at the head is not starved by small ones.
  A request whose grammar is still being compiled stands aside: it holds nothing and nobody waits for it.
- A request that needs a page when there is none takes it from the one admitted last (retract), never from an older
  one: the oldest request always finishes, so there is no livelock.
- A row beyond a length stop, which is known in advance, is never planned. A stop token is known only at the report:
  under overlap one surplus row may be in the next step; its token is dropped.
- A request that is `alone` shares no step with any other, and no open step either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol import Grant, Peer, RoomId, Row, Send
from . import rooms as r
from .events import Plan, SayPeer
from .rooms import Room

if TYPE_CHECKING:
    from .core import Leader

NO_PAGES: list[int] = []


class Scheduler:
    """Queue, slots and the planning of steps. The pool and the rooms are the leader's."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.chunk = leader.config.chunk
        self.queue: dict[RoomId, Room] = {}
        """Rooms that want pages and a slot, in the order in which they get them."""
        self.prefilling: dict[RoomId, Room] = {}
        self.decoding: dict[RoomId, Room] = {}
        """Rooms that draw a token per step: all of the prompt is in issued steps (or has arrived)."""
        self.slots = list(range(leader.config.max_running - 1, -1, -1))
        self.orders = 0
        self.alone = 0
        """Admitted rooms that run alone."""
        self.group: RoomId | None = None
        """Whose turn the last step was: a lone room's, or (None) everybody else's."""
        self.blocked_at = -1
        """`pool.freed` when the head of the queue last failed to get pages."""
        # pending work of the transfer threads, goes with the next step
        self.meet: list[Peer] = []
        self.drop: list[int] = []
        self.checks: list[Room] = []

    # ---------------------------------------------------------------------------------------------------- admission

    def enqueue(self, room: Room, at: float) -> None:
        room.waiting_since = at
        self.queue[room.id] = room

    def remove(self, room: Room) -> None:
        """The room has ended: it takes part in nothing any more."""
        if self.queue.pop(room.id, None) is not None:
            self.blocked_at = -1
        if self.prefilling.pop(room.id, None) is None:
            self.decoding.pop(room.id, None)

    def give_slot(self, room: Room) -> None:
        if room.slot >= 0:
            self.slots.append(room.slot)
            room.slot = -1
            self.alone -= room.alone

    def admit(self) -> None:
        """Give slots and pages to the queue's head as long as there are any."""
        pool = self.leader.pool
        while self.queue and self.slots and self.blocked_at != pool.freed:
            room = next((room for room in self.queue.values() if not room.form), None)
            if room is None:
                return
            if not self.hold(room):
                self.blocked_at = pool.freed
                return
            del self.queue[room.id]

    def hold(self, room: Room) -> bool:
        """Pages for the whole prompt (decode: and one token more) and a slot, all at once or nothing."""
        leader = self.leader
        size, pool, role = leader.page_size, leader.pool, leader.config.role
        found = pool.cache.match(room.hashes, (room.length - 1) // size) if leader.config.radix else []
        total = (room.length + (role == "decode") + size - 1) // size
        need = total - len(found)
        idle = pool.cache.idle
        available = pool.available - sum(page in idle for page in found)
        # leave a page for each running request, so that admission does not at once lead to retraction
        spare = 0 if role == "prefill" or not (self.decoding or self.prefilling) else len(self.decoding)
        if need + spare > available:
            return False
        pool.share(found)
        fresh = pool.take(need)
        assert fresh is not None
        room.pages = found + fresh
        room.shared = len(found)
        room.capacity = len(room.pages) * size
        room.slot = self.slots.pop()
        self.orders += 1
        room.order = self.orders
        self.alone += room.alone
        if role == "decode":
            room.skip = len(found)
            room.targets = room.pages[room.skip : (room.length + size - 1) // size]
            leader.rooms.move(room, r.RESERVE)
            self.say_grant(room)
            return True
        leader.rooms.move(room, r.ADMIT)
        room.planned = room.reported = len(found) * size
        room.cached = room.planned
        room.sent = room.skip
        leader.counters["cached_tokens"] += room.cached
        self.prefilling[room.id] = room
        return True

    def say_grant(self, room: Room) -> None:
        leader = self.leader
        room.writable = True
        room.said_at = leader.at
        leader.out.append(
            SayPeer(room.link, Grant(room.id, leader.config.instance, room.skip, room.targets, room.instance)),
        )

    # ----------------------------------------------------------------------------------------------------- planning

    def fill(self) -> None:
        """Issue steps while fewer than `depth` are open and there is work."""
        steps = self.leader.steps
        while len(steps.open) < steps.depth:
            self.admit()
            freed = self.leader.pool.freed
            if not self.plan(idle=False) and freed == self.leader.pool.freed:
                return

    def turn(self) -> tuple[RoomId | None, dict[RoomId, Room], dict[RoomId, Room]]:
        """Whose rows the next step has: with lone requests about, they and all others take turns."""
        if not self.alone:
            return None, self.decoding, self.prefilling
        lone = [x for d in (self.decoding, self.prefilling) for x in d.values() if x.alone]
        lone.sort(key=lambda x: x.order)
        decoding = {k: x for k, x in self.decoding.items() if not x.alone}
        prefilling = {k: x for k, x in self.prefilling.items() if not x.alone}
        choices: list[RoomId | None] = [x.id for x in lone]
        if decoding or prefilling:
            choices.append(None)
        if not choices:
            return None, decoding, prefilling
        after = choices.index(self.group) + 1 if self.group in choices else 0
        chosen = choices[after % len(choices)]
        if chosen is not None:
            decoding = {k: x for k, x in self.decoding.items() if k == chosen}
            prefilling = {k: x for k, x in self.prefilling.items() if k == chosen}
        return chosen, decoding, prefilling

    def plan(self, idle: bool) -> bool:
        """Plan and issue one step. False: there is nothing to do (and `idle` does not ask for an empty step)."""
        leader = self.leader
        group, decoding, prefilling = self.turn()
        if group != self.group:
            if leader.steps.open:
                return False  # lone and other requests are never open at once
            self.group = group
        rows: list[Row] = []
        rooms: list[Room] = []
        samplers: list[RoomId] = []
        begins: list[tuple[int, RoomId]] = []
        tables: list[list[int]] = []
        sends: list[Send] = []
        short: list[Room] = []
        if decoding:
            short = self.plan_decode(decoding, rows, rooms, samplers, begins, tables)
        if prefilling:
            self.plan_prefill(prefilling, rows, rooms, samplers, begins, tables, sends)
        checks = leader.handover.take_checks() if self.checks else []
        if not (rows or checks or self.meet or self.drop or idle):
            if short:
                self.relieve(short)
            return False
        step = leader.steps.issue(rows, rooms, leader.at)
        plan = Plan(step.n, rows, [], sends, checks, self.meet, self.drop, begins, tables, samplers)
        if self.meet or self.drop:
            leader.peers.issued(step.n, self.meet, self.drop)
        self.meet, self.drop = [], []  # also empty ones: the plan holds them, and what comes later is not its own
        leader.out.append(plan)
        if short:  # after the plan: its rows may be those of the victim
            self.relieve(short)
        return True

    def plan_decode(
        self,
        decoding: dict[RoomId, Room],
        rows: list[Row],
        rooms: list[Room],
        samplers: list[RoomId],
        begins: list[tuple[int, RoomId]],
        tables: list[list[int]],
    ) -> list[Room]:
        """One row for each request that may draw another token; returns those that are short of a page.

        The hot loop of the leader.
        """
        pool, size = self.leader.pool, self.leader.page_size
        short: list[Room] = []
        add_row, add_room, add_sampler = rows.append, rooms.append, samplers.append
        for room in decoding.values():
            sampled = room.sampled
            if sampled >= room.max_new:
                continue  # the length stop is known: nothing is computed beyond it
            start = room.planned
            pages = NO_PAGES
            if start >= room.capacity:
                page = pool.take_one()
                if page < 0:
                    short.append(room)
                    continue
                room.pages.append(page)
                room.capacity += size
                pages = [page]
            if not room.begun:
                room.begun = True
                begins.append((len(rows), room.id))
                tables.append(list(room.pages))
                pages = NO_PAGES
            room.planned = start + 1
            room.sampled = sampled + 1
            room.busy += 1
            add_row(Row(room.slot, start, 1, pages, True))
            add_room(room)
            add_sampler(room.id)
        return short

    def relieve(self, short: list[Room]) -> None:
        """Retract the last admitted request for the oldest that is short of a page; the row itself waits a step.

        At most one at a time: as long as a retracted one still holds pages (open steps), nobody else has to go.
        """
        leader = self.leader
        if any(room.busy for room in leader.rooms.closing.values()):
            return
        needy = min(short, key=lambda room: room.order)
        victims = [x for d in (self.decoding, self.prefilling) for x in d.values() if x.order > needy.order]
        if not victims:
            return  # everybody else is older and will finish, or has yet to arrive
        victim = max(victims, key=lambda room: room.order)
        leader.counters["retracted"] += 1
        leader.end(victim, r.RETRACT, "retract", "its pages were needed by an older request", retryable=True)

    def plan_prefill(
        self,
        prefilling: dict[RoomId, Room],
        rows: list[Row],
        rooms: list[Room],
        samplers: list[RoomId],
        begins: list[tuple[int, RoomId]],
        tables: list[list[int]],
        sends: list[Send],
    ) -> None:
        """Chunks of prompts, oldest first, up to `chunk` tokens."""
        budget = self.chunk
        done: list[Room] = []
        for room in prefilling.values():
            if budget <= 0:
                break
            start = room.planned
            count = min(budget, room.length - start)
            budget -= count
            last = start + count == room.length
            if not room.begun:
                room.begun = True
                begins.append((len(rows), room.id))
                tables.append(list(room.pages))
            room.planned = start + count
            room.busy += 1
            rows.append(Row(room.slot, start, count, NO_PAGES, last))
            rooms.append(room)
            if last:
                room.sampled += 1
                samplers.append(room.id)
                done.append(room)
            if room.instance:
                self.leader.handover.send_finished(room, last, sends)
        for room in done:
            del self.prefilling[room.id]
            if not room.instance:
                self.decoding[room.id] = room
