"""From incidents to recoveries: one at a time, what is refused for a while is tried again, what is well left alone."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import pytest

from closeranks.watch.incident import Incident
from closeranks.watch.recover_act import Actor
from closeranks.watch.recover_run import Outcome
from closeranks.watch.recover_state import Case, Loop
from closeranks.watch.snapshot import EngineSeen, Phase, Snapshot, State


class Watch:
    """Holds the engines that it names as confirmed."""

    def __init__(self, *confirmed: str) -> None:
        self.phases: dict[str, Phase] = dict.fromkeys(confirmed, "confirmed")
        self.snapshot = Snapshot(0.0, 0.0, (), {})
        self.proof = True

    @property
    def states(self) -> dict[str, State]:
        return {name: State(name, phase, (), 0.0, (), self.proof) for name, phase in self.phases.items()}


class Recovery:
    """Answers with the outcomes that it is given, one after the other; a recovered engine is healthy."""

    def __init__(self, watch: Watch, *outcomes: Outcome) -> None:
        self.watch, self.outcomes = watch, list(outcomes)
        self.cases: list[Case] = []
        self.left: list[Outcome] = []
        """Of the plan that is open."""
        self.now, self.waited = 0, False

    async def resume(self) -> Outcome | None:
        return self.left.pop(0) if self.left else None

    async def settled(self) -> bool:
        self.waited = True
        return True

    def remember(self, engines: Sequence[EngineSeen]) -> list[str]:
        return []

    def knows(self, name: str) -> bool:
        return name != "stranger"

    async def recover(self, case: Case, engines: Sequence[EngineSeen], loops: Mapping[str, Loop]) -> Outcome:
        self.now += 1
        assert self.now == 1, "two plans at once"
        await asyncio.sleep(0)
        self.now -= 1
        self.cases.append(case)
        outcome = self.outcomes.pop(0)
        if outcome.status == "recovered":
            self.watch.phases |= dict.fromkeys(self.watch.phases, "healthy")
        return outcome


RECOVERED = Outcome(status="recovered", says="")
LATER = Outcome(status="refused", says="cool-down", wait_s=0.01)
BUSY = Outcome(status="busy", says="another process holds the lock")
NEVER = Outcome(status="refused", says="no command line")


@pytest.mark.parametrize(
    ("incidents", "outcomes"),
    [
        (["decode"], [RECOVERED]),
        (["decode"], [LATER, LATER, RECOVERED]),
        (["decode"], [NEVER]),
        (["decode", "prefill"], [RECOVERED]),  # one plan brought both back
        (["decode", "decode"], [LATER, LATER, RECOVERED]),
    ],
)
def test_each_incident_ends_with_a_plan_that_ran_or_cannot(incidents: list[str], outcomes: list[Outcome]) -> None:
    async def main() -> tuple[Recovery, list[Outcome]]:
        watch = Watch("decode", "prefill")
        recovery, told = Recovery(watch, *outcomes), list[Outcome]()
        over = asyncio.Event()

        def tell(case: Case | None, outcome: Outcome) -> None:
            told.append(outcome)
            if not recovery.outcomes:
                over.set()

        actor = Actor(recovery, watch, tell, window_s=0.0, gather_s=0.0)  # type: ignore[arg-type]
        for engine in incidents:
            await actor.on_incident(Incident(engine, 0.0, ()))
        await asyncio.wait_for(over.wait(), 20)
        while actor._tasks:
            await asyncio.wait(actor._tasks)
        await actor.close()
        assert recovery.waited, "the watch ends between an end and its start"
        return recovery, told

    recovery, told = asyncio.run(main())
    assert told == [o for n, o in enumerate(outcomes) if o not in outcomes[:n]], "each answer is told once"
    assert recovery.outcomes == []


def test_an_engine_that_is_confirmed_again_and_again_is_seen_to_once() -> None:
    """Each confirmation would live on through a cool-down of its own, and say each of its seconds."""

    async def main() -> tuple[int, list[str], int]:
        watch, told, over = Watch("decode"), list[str](), asyncio.Event()
        waits = [Outcome(status="refused", says=f"restarted {n} s ago, of 300 s", wait_s=0.01) for n in range(3)]
        recovery = Recovery(watch, *waits, RECOVERED)

        def tell(case: Case | None, outcome: Outcome) -> None:
            told.append(outcome.status)
            if outcome is RECOVERED:
                over.set()

        actor = Actor(recovery, watch, tell, window_s=0.0, gather_s=0.0)  # type: ignore[arg-type]
        for _ in range(5):
            await actor.on_incident(Incident("decode", 0.0, ()))
        chains = len(actor._tasks)
        await asyncio.wait_for(over.wait(), 20)
        while actor._tasks:
            await asyncio.wait(actor._tasks)
        return chains, told, len(recovery.cases)

    assert asyncio.run(main()) == (1, ["refused", "recovered"], 4)


def test_no_plan_is_begun_by_a_watch_that_ends() -> None:
    async def main() -> list[Case]:
        watch, may_end = Watch("decode", "prefill"), asyncio.Event()
        recovery = Recovery(watch)

        async def settled() -> bool:
            await may_end.wait()
            return True

        recovery.settled = settled  # type: ignore[method-assign]
        actor = Actor(recovery, watch, window_s=0.0, gather_s=0.0)  # type: ignore[arg-type]
        await actor.on_incident(Incident("decode", 0.0, ()))
        closing = asyncio.create_task(actor.close())
        await asyncio.sleep(0)
        await actor.on_incident(Incident("prefill", 0.0, ()))
        while actor._tasks:
            await asyncio.wait(actor._tasks)
        may_end.set()
        await closing
        return recovery.cases

    assert asyncio.run(main()) == []


@pytest.mark.parametrize(("ago_s", "gather_s"), [(5000.0, 3600.0), (-1e6, 0.01)])
def test_a_recovery_waits_for_others_from_the_confirmation_on(ago_s: float, gather_s: float) -> None:
    """Not from the verdict on, and not for ever where the clock was set back meanwhile."""

    async def main() -> Recovery:
        watch = Watch("decode")
        recovery = Recovery(watch, RECOVERED)
        actor = Actor(recovery, watch, window_s=0.0, gather_s=gather_s)  # type: ignore[arg-type]
        await actor.on_incident(Incident("decode", time.time() - ago_s, ()))
        await asyncio.wait_for(asyncio.wait(actor._tasks), 20)
        await actor.close()
        return recovery

    assert len(asyncio.run(main()).cases) == 1


def test_another_that_acts_is_waited_for_and_followed_when_it_dies() -> None:
    """Two watches on one service: the second is busy while the first acts, and takes over if that does not finish."""

    async def main() -> tuple[list[Case], list[str]]:
        watch = Watch("decode")
        recovery, told, over = Recovery(watch, BUSY, BUSY, BUSY, RECOVERED), list[str](), asyncio.Event()

        def tell(case: Case | None, outcome: Outcome) -> None:
            told.append(outcome.status)
            if outcome.status == "recovered":
                over.set()

        actor = Actor(recovery, watch, tell, window_s=0.0, gather_s=0.0, busy_s=0.01)  # type: ignore[arg-type]
        await actor.on_incident(Incident("decode", 0.0, ()))
        await asyncio.wait_for(over.wait(), 20)
        await actor.close()
        return recovery.cases, told

    cases, told = asyncio.run(main())
    assert len(cases) == 4
    assert told == ["busy", "recovered"], "each answer is told once"


@pytest.mark.parametrize(("engine", "proof", "said"), [("decode", False, "its log"), ("stranger", True, "remembers")])
def test_an_engine_of_which_nothing_is_left_is_started_on_proof_only(engine: str, proof: bool, said: str) -> None:
    """An operator may have ended it; a log that could be read would say so."""

    async def main() -> tuple[list[Case], list[Outcome]]:
        watch, told = Watch(engine), list[Outcome]()
        watch.proof = proof
        recovery = Recovery(watch)
        actor = Actor(recovery, watch, lambda case, o: told.append(o), window_s=0.0, gather_s=0.0)  # type: ignore[arg-type]
        await actor.on_incident(Incident(engine, 0.0, ()))
        while actor._tasks:
            await asyncio.wait(actor._tasks)
        return recovery.cases, told

    cases, told = asyncio.run(main())
    assert cases == []
    assert told[0].status == "refused"
    assert said in told[0].says


def test_a_plan_that_was_left_open_is_gone_on_with_whatever_is_held_of_its_engine() -> None:
    """The engine is gone by recovery's own doing: nothing of it is seen, and nothing that proves a death. And one that
    was left by hand, with no incident of ours, is gone on with, too."""

    async def main() -> tuple[list[Case], list[str]]:
        watch, told, over = Watch("decode"), list[str](), asyncio.Event()
        lies = Outcome(status="failed", says="ended and not started: decode", wait_s=0.01)
        by_hand = Outcome(status="recovered", says="left by hand")
        recovery = Recovery(watch, lies)

        def tell(case: Case | None, outcome: Outcome) -> None:
            told.append(outcome.says)
            watch.phases["decode"] = "healthy" if outcome is RECOVERED else "blind"
            if outcome is lies:
                recovery.left = [lies, BUSY, lies, RECOVERED]
            if outcome is RECOVERED:
                recovery.left = [by_hand]
            if outcome is by_hand:
                over.set()

        actor = Actor(recovery, watch, tell, window_s=0.0, gather_s=0.0, go_on_s=0.01)  # type: ignore[arg-type]
        await actor.begin()
        await actor.on_incident(Incident("decode", 0.0, ()))
        await asyncio.wait_for(over.wait(), 20)
        await actor.close()
        return recovery.cases, told

    cases, told = asyncio.run(main())
    assert len(cases) == 1
    assert told == ["ended and not started: decode", "", "left by hand"], "each answer is told once"


def test_an_engine_that_moves_again_is_left_alone() -> None:
    async def main() -> list[Case]:
        watch = Watch("decode")
        recovery = Recovery(watch)
        actor = Actor(recovery, watch, window_s=0.0, gather_s=0.0)  # type: ignore[arg-type]
        watch.phases["decode"] = "healthy"
        await actor.on_incident(Incident("decode", 0.0, ()))
        while actor._tasks:
            await asyncio.wait(actor._tasks)
        return recovery.cases

    assert asyncio.run(main()) == []
