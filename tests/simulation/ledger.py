"""What a gateway may make of an engine's words: those of an older attempt change nothing, charges are counted."""

from typing import Any

from closeranks.gateway.resume import ALONE_AFTER, Request, Requests
from closeranks.protocol import Output, RoomId, Submit
from tests.simulation.attempts import is_current
from tests.simulation.world import Violation


def standing(request: Request) -> tuple[Any, ...]:
    """Everything of a request that a message can change."""
    return (
        request.generation,
        request.pair,
        request.spoke,
        len(request.tokens),
        sorted(request.early),
        request.held,
        dict(request.charges),
        request.refused,
        request.fails,
    )


class Ledger:
    """Of one gateway."""

    def __init__(self, table: Requests) -> None:
        self.table = table
        self.charges: dict[int, list[tuple[str, int] | None]] = {}
        """Open request -> the epochs (engine, instance) whose faults it was in; None: another was the cause."""
        self.charged: set[RoomId] = set()
        self.alone: set[RoomId] = set()
        """Attempts that run alone."""
        self.named: set[int] = set()
        """Requests that the message at hand charges."""
        self.acquitted: set[int] = set()
        """Requests whose charges the message at hand explains."""
        self.unmoved: dict[int, tuple[Any, ...]] = {}
        """Request of which the message at hand brings only words of other attempts -> how it stands."""

    def submitted(self, submit: Submit) -> None:
        """An attempt begins; `alone` from the second charge on."""
        charges = self.charges[submit.room.id]
        said_before = submit.alone and submit.room.id in self.acquitted  # its end stood before the culprit's
        if submit.alone != (len(charges) >= ALONE_AFTER and any(charges)) and not said_before:
            raise Violation(f"{submit.room}: charged for {charges}, alone {submit.alone}")
        if submit.alone:
            self.alone.add(submit.room)
        request = self.table.open[submit.room.id]
        if len(submit.tokens) + submit.max_new_tokens != request.prompt_length + request.max_new_tokens:
            raise Violation(f"{submit.room}: {len(submit.tokens)} tokens and {submit.max_new_tokens} to come")

    def opened(self, request: Request) -> None:
        self.charges[request.id] = list(request.charges.values())

    def before(self, endpoint: str, output: Output) -> None:
        """The message is about to reach the table."""
        self.unmoved, self.named = {}, {word.room.id for word in output.ended if word.charged}
        current: set[int] = set()
        for word in (*output.tokens, *output.ended):
            request = self.table.open.get(word.room.id)
            if request is None:
                continue
            if is_current(request, word.room, endpoint):
                current.add(request.id)
            else:
                self.unmoved[request.id] = standing(request)
        for ended in output.ended:
            room = ended.room
            if ended.charged and room.id in self.table.open and room not in self.charged:
                self.charged.add(room)
                status = self.table.router.engines[endpoint].status
                assert status is not None
                self.charges[room.id].append((endpoint, status.instance))
                current.add(room.id)
                if room in self.alone:
                    self.convict(room.id)
        for number in current:
            self.unmoved.pop(number, None)

    def convict(self, culprit: int) -> None:
        """What it did, nobody else did."""
        did = set(self.charges[culprit])
        for number, charges in self.charges.items():
            if number != culprit:
                self.charges[number] = [None if life in did else life for life in charges]
                if self.charges[number] != charges:
                    self.named.add(number)
                    self.acquitted.add(number)
                    self.unmoved.pop(number, None)

    def after(self) -> None:
        """The table has heard it."""
        self.acquitted.clear()
        for number, was in self.unmoved.items():
            request = self.table.open.get(number)
            now = standing(request) if request is not None else None
            if now != was:
                raise Violation(f"{number:016x}.1: moved by the word of another attempt: {was} to {now}")
        for number in self.named:
            request = self.table.open.get(number)
            if request is not None and list(request.charges.values()) != self.charges[number]:
                raise Violation(f"{number:016x}.1: charged for {self.charges[number]}, counts {request.charges}")
