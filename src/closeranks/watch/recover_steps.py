"""The steps of a plan, done: through a platform or over HTTP, each with its own time limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from closeranks.supervise.platforms import Platform, Target, ends_with_us
from closeranks.watch.recover_state import Action, Policy
from closeranks.watch.recover_wire import Endpoint, StepFailed, Wire

LOOK_S = 0.5


class Stopped(Exception):
    """An operator's stop file appeared while a step waited."""


class EndedAgain(StepFailed):
    """An engine that was started ended before it was ready."""


class Facts(msgspec.Struct, frozen=True):
    """All that the steps of a plan need, kept beside the journal until the plan is over. Holds secrets."""

    targets: dict[str, Target]
    endpoints: dict[str, Endpoint]


class Hands:
    """Does the steps of one plan. `platforms` gives the platform of a name; `folder` is recovery's own."""

    def __init__(
        self,
        plan: str,
        facts: Facts,
        wire: Wire,
        policy: Policy,
        platforms: Callable[[str], Platform],
        folder: Path,
        stopped: Callable[[], Awaitable[bool]],
    ) -> None:
        self._plan, self._facts, self._wire, self._policy = plan, facts, wire, policy
        self._platforms, self._folder, self._stopped = platforms, folder, stopped

    async def do(self, action: Action, last: bool) -> str:
        """Do it; what came of it, in words. `last`: it is the plan's last step.

        Raises StepFailed, PlatformError, OSError when it failed, Stopped when an operator stopped it while it waited.
        """
        ends, wire = self._facts.endpoints, self._wire
        match action.kind:
            case "drain":
                return await wire.drain(ends[action.engine])
            case "abort":
                return await wire.abort(ends[action.engine])
            case "end":
                target = self._facts.targets[action.engine]
                count = await asyncio.to_thread(self._platform(action).end_tree, target, action.deadline_s)
                return f"{count} process(es) ended, none is left"
            case "start":
                target = self._facts.targets[action.engine]
                start = self._platform(action).start
                end = ends[action.engine]
                if target.platform == "plain" and end.kind != "closeranks" and await wire.ready(end):
                    return "it answers already: not started beside that"  # by an operator, while the plan lay open
                says = await asyncio.to_thread(start, target, _token(self._plan, action.engine), self._folder)
                but = await asyncio.to_thread(ends_with_us) if target.platform == "plain" else ""
                return f"{says}; {but}" if but else says
            case "ready":
                return await self._until_ready(action)
            case "verify":
                return await self._verify(action)
            case "admit":
                return await self._admit(action, last)

    async def still_runs(self, action: Action) -> bool:
        """Whether the life that an `end` was to end runs. Raises PlatformError where that is not known."""
        target = self._facts.targets[action.engine]
        return await asyncio.to_thread(self._platform(action).is_running, target)

    async def _until_ready(self, action: Action) -> str:
        until = time.monotonic() + action.deadline_s
        platform, target = self._platform(action), self._facts.targets[action.engine]
        late = False
        while not late:
            late = time.monotonic() >= until  # before it is asked: the answer counts, however long we were stopped
            if await self._wire.ready(self._facts.endpoints[action.engine]):
                return "its own health answers 200"
            fate = await asyncio.to_thread(platform.has_ended, target, _token(self._plan, action.engine), self._folder)
            if fate:
                raise EndedAgain(f"{action.engine} ended again: {fate}")
            await self._pause()
        raise StepFailed(f"{action.engine} did not get ready within {action.deadline_s:.0f} s")

    async def _verify(self, action: Action) -> str:
        tries = self._policy.verify_tries
        for left in reversed(range(tries)):
            try:
                return await self._check(action.engines)
            except StepFailed:
                if not left:
                    raise
                await self._pause()
        raise StepFailed("no check was asked for (verify_tries is 0)")

    async def _admit(self, action: Action, last: bool) -> str:
        """Back into the router; after the last one, more and more check requests at a time, so that a path that only
        carries one is not taken for one that serves."""
        ends, wire = self._facts.endpoints, self._wire
        says = await wire.admit(ends[action.engine], self._policy.verify_s)
        if not last:
            return says
        for count in self._policy.ramp:
            await self._heed()
            await self._check(action.engines, count)
            if wire.router:
                await asyncio.gather(*(wire.through_router(self._policy.verify_s) for _ in range(count)))
        return f"{says}; {' then '.join(map(str, self._policy.ramp))} check requests at a time passed"

    async def _check(self, engines: Sequence[str], at_once: int = 1) -> str:
        limit_s, every = self._policy.verify_s, bool(self._policy.peers)
        return await self._wire.check(engines, self._facts.endpoints, limit_s, at_once, every)

    async def _pause(self) -> None:
        await self._heed()
        await asyncio.sleep(LOOK_S)

    async def _heed(self) -> None:
        if await self._stopped():
            raise Stopped

    def _platform(self, action: Action) -> Platform:
        return self._platforms(self._facts.targets[action.engine].platform)


def _token(plan: str, engine: str) -> str:
    """What a start is known by: of an engine there is one at a time in a plan."""
    return f"{plan}.{engine.replace('/', '_')}"
