"""`closeranks watch` that is told to end: all that it still waits for is waited for at once."""

import asyncio
import os
import signal

import pytest

from closeranks.cli.watch import Afterwards, _watch
from closeranks.watch import loop, recover_act
from closeranks.watch.settings import Settings


def test_acting_ends_beside_the_watch_not_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they took longer than systemd waits before it kills: between an end and its start."""
    order, acted = list[str](), asyncio.Event()

    class Watch:
        looks, states, told = 0, dict[str, object](), None

        def __init__(self, settings: Settings) -> None:
            self.on_incident: object = None

        async def searched(self) -> bool:
            return True

        async def run(self, stop: asyncio.Event) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            await asyncio.wait_for(acted.wait(), 20)  # as evidence that is finished
            order.append("watch")

    class Actor:
        def __init__(self, *args: object) -> None:
            pass

        async def begin(self) -> None:
            order.append("begin")

        async def close(self) -> None:
            order.append("close")
            acted.set()

    monkeypatch.setattr(loop, "Watch", Watch)
    monkeypatch.setattr(recover_act, "Actor", Actor)
    after = Afterwards(object(), [], [], True)
    assert asyncio.run(_watch(Settings(port=-1), True, after)) == 0
    assert order == ["begin", "close", "watch"]
