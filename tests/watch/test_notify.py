"""Notifications: delivered in the background, tried again, bounded, and without a secret in them."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from closeranks.watch.notify import Notifier


def serve(answer: Callable[[web.Request], Awaitable[web.Response]], use: Callable[[str], Awaitable[None]]) -> None:
    """Run `use` with the address of a server that answers so."""

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/hook/secret-path", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            await asyncio.wait_for(use(f"http://127.0.0.1:{port}/hook/secret-path"), 30)
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_events_arrive_in_order_and_redacted() -> None:
    got: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.Response()

    async def use(url: str) -> None:
        notifier = Notifier([url])
        notifier.send(
            {"event": "confirmed", "why": ["--api-key sk-verysecretkey1"], "more": {"deep": ["hf_" + "a" * 20]}}
        )
        notifier.send({"event": "recovered", "broken": "\udcff"})
        await notifier.close()
        assert notifier.lost == 0

    serve(answer, use)
    assert [e["event"] for e in got] == ["confirmed", "recovered"]
    assert "sk-verysecretkey1" not in json.dumps(got)
    assert "hf_a" not in json.dumps(got)
    assert got[0]["schema"] == 1


def test_a_receiver_that_fails_is_tried_again() -> None:
    calls = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=503 if calls < 3 else 200)

    async def use(url: str) -> None:
        notifier = Notifier([url], pause_s=0.01)
        notifier.send({"event": "x"})
        await notifier.close()
        assert (calls, notifier.lost) == (3, 0)

    serve(answer, use)


def test_a_refusal_is_final_and_counted() -> None:
    calls = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=404)

    async def use(url: str) -> None:
        notifier = Notifier([url], pause_s=0.01)
        notifier.send({"event": "x"})
        await notifier.close()
        assert (calls, notifier.lost) == (1, 1)

    serve(answer, use)


def test_one_that_hangs_holds_nobody_up() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def use(url: str) -> None:
        notifier = Notifier([url], limit_s=0.05, pause_s=0.01)
        began = time.monotonic()
        for _ in range(500):
            notifier.send({"event": "x"})  # never blocks, bounded
        assert time.monotonic() - began < 5
        await notifier.close(patience_s=0.5)
        assert notifier.lost > 250

    serve(answer, use)


def test_a_command_gets_the_event_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async def main() -> None:
        program = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
        notifier = Notifier(
            commands=[f'{sys.executable} -c "{program}"', "sleep 600", "closeranks-no-such-command"], command_s=2.0
        )
        notifier.send({"event": "confirmed"})
        await notifier.close(20)
        assert notifier.lost == 2

    asyncio.run(main())
    assert json.loads(out.read_text())["event"] == "confirmed"


@pytest.mark.parametrize("command", ["", " ", "sh -c 'x"])
def test_what_is_no_command_is_said_before_anything_happens(command: str) -> None:
    with pytest.raises(ValueError, match="command"):
        Notifier(commands=[command])


def test_without_receivers_nothing_runs() -> None:
    async def main() -> None:
        notifier = Notifier()
        notifier.send({"event": "x"})
        await notifier.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
