"""A pair whose hand-overs fail one after the other, look by look; and all that only resembles it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.watch.limits import DEFAULT
from closeranks.watch.machine import Memory, step
from closeranks.watch.recover_state import NOT_OURS
from closeranks.watch.snapshot import Blind, EngineSeen, Kind, Snapshot, State
from closeranks.watch.verdict import Judged, by_signs
from tests.watch.looks import NAME, Film, engine, signals

PREFILL = "prefill-31021"
REFUSED = {"ok": False, "answered": True, "said": "HTTP 500"}
HANGS = {"ok": False, "answered": False, "said": "no answer in 6 s"}
WORKS = {"ok": True, "answered": True, "said": ""}


class PairFilm:
    """A prefill and a decode engine whose loops turn. `fails`: hand-overs that fail per look, on each side, beyond
    those that were given up."""

    def __init__(self, kind: Kind = "sglang", before: float = 0.0) -> None:
        self.at, self.kind, self.ticks, self.tokens, self.base = 1000.0, kind, 0.0, 5.0, 500
        self.made = 0.0
        self.memory = Memory()
        self.refused = {"decode": before, "prefill": before}

    def engines(self, without: str = "") -> tuple[EngineSeen, ...]:
        pair = (engine(self.kind), engine(self.kind, "prefill", PREFILL, self.base))
        url = "http://127.0.0.1:8000" if self.kind == "closeranks" else None  # one gateway for both
        return tuple(msgspec.structs.replace(e, url=url or e.url) for e in pair if e.name != without)

    def look(
        self,
        tokens: float = 0.0,
        fails: float = 0.0,
        prefill_fails: float | None = None,
        probe: dict[str, Any] | None = None,
        without: str = "",
        blind: str = "",
        starting: str = "",
        paused: bool = False,
        life: int | None = None,
        after: float = 1.0,
        held: dict[str, dict[str, float]] | None = None,
        prefill_tokens: float = 0.0,
    ) -> str:
        """One look; the phase of decode that follows. `held`: role → queue → requests."""
        self.at += after
        self.ticks += 1
        self.tokens += tokens
        self.made += prefill_tokens
        self.base = life or self.base
        self.refused["decode"] += fails
        self.refused["prefill"] += fails if prefill_fails is None else prefill_fails
        if life:
            self.refused["prefill"] = 0.0
        readings: dict[Any, dict[str, Any]] = {n: {} for n in ("proc", "counters", "steps", "log", "probe")}
        for seen in self.engines(without):
            for p in seen.procs:
                readings["proc"][f"{seen.name}/{p.label}"] = {
                    "at": self.at, "pid": float(p.pid), "start": 1.0, "state": "S", "switches": self.ticks,
                    "ticks": self.ticks, "frozen": False}  # fmt: skip
            up = seen.name != starting
            queues = (held or {}).get(seen.role, {})
            made = self.tokens + (self.made if seen.role == "prefill" else 0.0)
            found: dict[str, Any] = {
                "running": 0.0,
                "held": bool(queues),
                "finished": 7.0,
                "at": self.at,
                "tokens": made,
                **queues,
            }
            found |= {"steps": self.ticks, "up": float(up), "unhealthy": ""} if self.kind == "closeranks" else {}
            found["sends"] = queues.get("inflight", 0) > 0
            found |= {f"busy_{n}": self.ticks for n in range(4)} if self.kind == "sglang" else {}
            if (refused := self.refused[seen.role]) or self.kind != "sglang":  # the series appear with the first
                found["refused"] = refused
            signal = "steps" if self.kind == "closeranks" else "counters"
            readings[signal][seen.name] = Blind("cannot connect") if seen.name in (blind, starting) else found
            readings["log"][seen.name] = {
                "ready": up, "ending": False, "paused": paused, "updating": False, "crash": "", "thread": "",
                "at": self.at, "pid": float(seen.procs[0].pid), "start": 1.0}  # fmt: skip
            if probe is not None:
                readings["probe"][seen.name] = {"at": self.at, "began": self.at - 0.2, **probe}
        shot = Snapshot(self.at, 0.0, self.engines(without), readings)
        self.memory = step(self.memory, shot, DEFAULT)
        return self.state.phase

    def looks(self, number: int, **how: Any) -> list[str]:
        return [self.look(**how) for _ in range(number)]

    @property
    def state(self) -> State:
        return self.memory.states[NAME]


def settled(kind: Kind = "sglang", before: float = 0.0) -> PairFilm:
    """One that has served for a while."""
    film = PairFilm(kind, before)
    assert film.looks(35, tokens=3)[-1] == "healthy"
    return film


@pytest.mark.parametrize("kind", ["sglang", "vllm", "closeranks"])
@pytest.mark.parametrize("before", [0.0, 40.0])
def test_a_pair_whose_every_hand_over_fails_is_confirmed_by_probes_that_fail_at_once(kind: Kind, before: float) -> None:
    film = settled(kind, before)
    phases = film.looks(4, fails=1)
    assert phases[0] == "healthy"
    assert phases[-1] == "suspect"
    phases = film.looks(8, fails=2, probe=REFUSED)
    assert "confirmed" in phases
    assert (film.state.cls, film.state.proof) == ("KV_TRANSFER", False)
    assert signals(film.state) == {"counters" if kind != "closeranks" else "steps", "probe"}
    assert film.memory.states[PREFILL].phase == "healthy"


def test_one_side_that_counts_is_enough() -> None:
    """Decode's legs may be given up by the router, and count for nothing."""
    film = settled()
    assert "confirmed" in film.looks(12, fails=0, prefill_fails=1, probe=REFUSED)


def test_it_is_let_go_by_a_token_only() -> None:
    """Nothing is held meanwhile, the loop turns, and nobody may ask any more."""
    film = settled()
    film.looks(12, fails=1, probe=REFUSED)
    assert set(film.looks(60)) == {"confirmed"}
    assert film.look(tokens=1) in ("confirmed", "healthy")
    assert film.looks(12, tokens=1)[-1] == "healthy"
    assert film.state.cls == ""


@pytest.mark.parametrize("probe", [None, WORKS, HANGS])
def test_counters_alone_suspect_and_confirm_nothing(probe: dict[str, Any] | None) -> None:
    """A probe that is not answered says that the path is slow, which another rule judges by what is held."""
    film = settled()
    phases = film.looks(60, fails=2, probe=probe)
    assert set(phases) == {"healthy", "suspect"}


def test_failing_probes_alone_say_nothing() -> None:
    film = settled()
    assert set(film.looks(60, probe=REFUSED)) == {"healthy"}


def test_a_probe_that_fails_while_nothing_is_counted_says_nothing() -> None:
    """Such as at a router that is full: its refusals never come to an engine."""
    film = settled()
    film.looks(4, fails=2)
    assert "confirmed" not in film.looks(60, probe=REFUSED)


def test_one_failed_probe_is_not_enough() -> None:
    film = settled()
    film.looks(8, fails=2)
    assert film.look(fails=2, probe=REFUSED) == "suspect"
    assert film.look(fails=2, probe=WORKS) == "suspect"
    assert film.look(fails=2, probe=REFUSED) == "suspect"
    assert film.look(fails=2, probe=REFUSED) == "confirmed"


def test_a_suspicion_ends_when_nothing_fails_any_more() -> None:
    film = settled()
    assert film.looks(5, fails=2)[-1] == "suspect"
    assert film.looks(30)[-1] == "healthy"


@given(
    script=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=20, max_size=40),
    kind=st.sampled_from(["sglang", "vllm", "closeranks"]),
)
@settings(max_examples=12, deadline=None)
def test_failures_among_requests_that_are_served_are_never_confirmed(
    script: list[tuple[int, bool]], kind: Kind
) -> None:
    """A token at least at every fifth look, any number of failures, and every probe unlucky."""
    film, dry = settled(kind), 0
    for fails, token in script:
        dry = 0 if token else dry + 1
        token, dry = (True, 0) if dry > 4 else (token, dry)
        assert film.look(tokens=float(token), fails=float(fails), probe=REFUSED) != "confirmed"


@given(script=st.lists(st.integers(-6, 6), min_size=20, max_size=40), kind=st.sampled_from(["sglang", "vllm"]))
@settings(max_examples=12, deadline=None)
def test_an_abort_storm_is_never_confirmed(script: list[int], kind: Kind) -> None:
    """Not one request is served in it. Those that are given up are counted as such at once and as failures a moment
    later: the difference falls and comes back, and may sink. A pair that works lets probes pass."""
    film, level = settled(kind), 0
    for change in script:
        new = min(0, level + change)
        assert film.look(fails=float(new - level), probe=WORKS) == "healthy"
        level = new


@pytest.mark.parametrize("away", [{"without": PREFILL}, {"starting": PREFILL}, {"blind": PREFILL}])
def test_a_prefill_that_restarts_explains_the_failures_of_its_time(away: dict[str, str]) -> None:
    film = settled()
    film.looks(3, fails=2)
    gone: dict[str, Any] = {"life": 700} if "starting" in away else {}
    assert "confirmed" not in film.looks(60, fails=2, probe=REFUSED, **gone, **away)
    assert "confirmed" not in film.looks(25 if "blind" not in away else 1, fails=1, probe=REFUSED, life=700)
    assert film.looks(30, tokens=3)[-1] == "healthy"
    assert "confirmed" in film.looks(12, fails=1, probe=REFUSED)


def test_a_prefill_that_came_back_and_is_never_accepted_is_found_after_a_while() -> None:
    """Decode keeps what it knows of the one before: no request is ever served again."""
    film = settled()
    film.looks(20, fails=1, probe=REFUSED, without=PREFILL)
    phases = film.looks(60, fails=1, probe=REFUSED, life=700)
    assert phases.index("confirmed") >= 29


def test_a_prefill_that_is_not_in_view_may_be_restarting_for_long() -> None:
    film = PairFilm()
    film.looks(35, tokens=3, without=PREFILL)
    how: dict[str, Any] = {"fails": 1, "probe": REFUSED, "without": PREFILL, "after": 3.0}
    phases = film.looks(190, **how)
    assert set(phases[5:]) == {"excluded"}
    assert "confirmed" in film.looks(30, **how)


def test_a_paused_pair_is_not_judged() -> None:
    film = settled()
    assert "confirmed" not in film.looks(60, fails=1, probe=REFUSED, paused=True)


def test_an_engine_that_decodes_and_was_restarted_has_time_to_find_its_peer() -> None:
    film = settled()
    again = engine("sglang", "decode", NAME, 900)
    film.engines = lambda without="": (again, engine("sglang", "prefill", PREFILL, 500))  # type: ignore[method-assign]
    film.tokens = 0.0
    assert "confirmed" not in film.looks(29, fails=1, probe=REFUSED)
    assert "confirmed" in film.looks(20, fails=1, probe=REFUSED)


def test_a_diagnosis_that_finds_nothing_does_not_speak_against_the_signs() -> None:
    """Without a log, loops that poll and empty queues look idle; a restart must not be refused."""
    idle = Judged("HEALTHY_IDLE", "likely", "idle", files={"verdict.md": "x"})
    found = by_signs(idle, "KV_TRANSFER", "9 hand-overs failed")
    assert (found.cls, found.certainty, found.files) == ("KV_TRANSFER", "likely", idle.files)
    assert found.cls not in NOT_OURS
    assert "9 hand-overs failed" in found.summary
    named = Judged("STALE_PEER", "shown", "x")
    assert by_signs(named, "KV_TRANSFER", "y") == named


@pytest.mark.parametrize("asked", [0.0, 1.0])
def test_a_pair_whose_sender_is_dead_stays_confirmed_until_a_token_comes_out_of_it(asked: float) -> None:
    """Clients give up and ask again: prefill makes a token of each request that gets no further. Nobody may ask."""
    film = settled()
    how: dict[str, Any] = {"probe": HANGS, "held": {"decode": {"running": 2.0}, "prefill": {"inflight": 5.0}}}
    film.looks(14, **how)
    for _ in range(9):
        film.look(**how, prefill_tokens=asked)
        film.looks(4, **how)
        assert {film.state.phase, film.memory.states[PREFILL].phase} == {"confirmed"}
    assert film.state.cls == "KV_TRANSFER"
    film.looks(12, tokens=1)
    assert {film.state.phase, film.memory.states[PREFILL].phase} == {"healthy"}


def test_an_engine_that_hands_over_to_one_not_in_view_is_let_go_by_what_it_finishes() -> None:
    film = Film(engine(role="prefill", name=PREFILL))
    film.looks(6)
    how: dict[str, Any] = {"numbers": {"inflight": 3.0, "finished": 20.0}, "tokens": "stands"}
    film.looks(70, **how)
    assert film.look(**how, probe={"ok": False}) == "confirmed"
    more = [film.look(numbers={"inflight": 3.0, "finished": 20.0}, tokens="moves") for _ in range(15)]
    assert set(more) == {"confirmed"}, "tokens that it makes itself"
    again = [film.look(numbers={"inflight": 3.0, "finished": 20.0 + n}) for n in range(15)]
    assert again[-1] == "healthy"


def test_a_stall_that_a_diagnosis_cannot_name_is_not_sound() -> None:
    busy = Judged("NOT_HUNG_SLOW_OR_CAPACITY", "likely", "token counters of prefill grow")
    found = by_signs(busy, "UNDETERMINED", "requests are held")
    assert (found.cls, found.certainty) == ("UNDETERMINED", "undetermined")


def test_a_dead_sender_is_seen_while_clients_come_again_all_the_time() -> None:
    """Decode, whose gauges may be old, holds nothing by them."""
    film = settled()
    for _ in range(8):
        film.looks(3, probe=HANGS, held={"prefill": {"inflight": 5.0, "running": 1.0}}, prefill_tokens=1.0)
    assert film.memory.states[PREFILL].phase == "confirmed"
    assert film.memory.states[PREFILL].cls == "KV_TRANSFER"


def test_a_prompt_that_took_long_and_is_then_handed_over_is_no_stall() -> None:
    film = settled()
    film.looks(60, held={"prefill": {"running": 1.0}})
    for _ in range(4):
        film.look(probe=HANGS, held={"prefill": {"inflight": 1.0}}, prefill_tokens=1.0)
        assert film.memory.states[PREFILL].phase != "confirmed"


def test_an_engine_that_waited_for_decode_a_moment_ago_explains_no_failure() -> None:
    """In a busy pair it does so every few seconds."""
    film = settled()
    film.looks(8, tokens=1, held={"prefill": {"inflight": 2.0}})
    assert film.memory.states[PREFILL].phase == "excluded"
    assert film.looks(5, fails=1)[-1] == "suspect"
    assert "confirmed" in film.looks(8, fails=2, probe=REFUSED)
