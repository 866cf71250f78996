"""What polls cost, and what that must not hide: connections and threads that are kept, questions that are not asked."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from closeranks.watch import aside, discover
from closeranks.watch.aside import Aside
from closeranks.watch.discover import Finder
from closeranks.watch.procfs import Row
from closeranks.watch.signals import counters, loads
from closeranks.watch.signals.fetch import FRESH_EVERY, Client
from closeranks.watch.snapshot import Blind
from tests.watch.test_watch_signals import at, served

Talk = Callable[[int, int], str]
"""Numbers of the connection and of the request on it → `answer`, `close` without one, `answer and close`, `silence`."""


class Server:
    """Speaks HTTP/1.1 as it is told; remembers which connection each request came by."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.asked, self.connections = talk, list[int](), 0
        self._open: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def __aenter__(self) -> "Server":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*(task for task in self._open if task is not None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[asyncio.current_task()] = writer
        number, self.connections = self.connections, self.connections + 1
        try:
            for request in range(1000):
                await reader.readuntil(b"\r\n\r\n")
                self.asked.append(number)
                how = self.talk(number, request)
                if how == "silence":
                    continue
                if how != "close":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    await writer.drain()
                if "close" in how:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done with it
        writer.close()


def with_server(talk: Talk, what: Callable[[Server, Client], Awaitable[None]], limit_s: float = 30.0) -> Server:
    async def go() -> Server:
        client = Client(limit_s)
        async with Server(talk) as server:
            try:
                await what(server, client)
            finally:
                await client.close()
        return server

    return asyncio.run(go())


def test_polls_keep_a_connection_and_bring_a_new_one_every_few() -> None:
    async def what(server: Server, client: Client) -> None:
        for _ in range(3 * FRESH_EVERY):
            assert (await client.poll(server.url)).ok

    server = with_server(lambda connection, request: "answer", what)
    assert server.connections == 3 + 1
    kept = max(server.asked, key=server.asked.count)
    assert server.asked.count(kept) == 3 * FRESH_EVERY - 3
    assert server.asked[0::FRESH_EVERY].count(kept) == 0


def test_what_decides_something_never_goes_over_a_kept_connection() -> None:
    async def what(server: Server, client: Client) -> None:
        for _ in range(3):
            await client.poll(server.url)
        for _ in range(4):
            assert (await client.get(server.url)).ok
            assert (await client.post(server.url, {})).ok

    server = with_server(lambda connection, request: "answer", what)
    assert len(set(server.asked[-8:])) == 8


@pytest.mark.parametrize("end", ["answer and close", "close"])
def test_a_kept_connection_that_was_closed_is_no_failure(end: str) -> None:
    """Between two requests, as servers do after a few idle seconds, or just when the next one comes."""

    def talk(connection: int, request: int) -> str:
        return "answer" if end == "close" and request == 0 else end

    async def what(server: Server, client: Client) -> None:
        for _ in range(10):
            assert (await client.poll(server.url)).ok

    with_server(talk, what)


def test_a_server_that_closes_every_connection_is_asked_a_few_times_and_no_more() -> None:
    """aiohttp asks once more by itself, over whatever connection it has; so do we, over a new one."""

    async def what(server: Server, client: Client) -> None:
        await client.poll(server.url)
        client._polls[server.url] = 1
        before = len(server.asked)
        answer = await client.poll(server.url)
        assert (answer.status, answer.accepted) == (0, True)
        assert len(server.asked) - before <= 4

    with_server(lambda connection, request: "close", what)


def test_silence_on_a_kept_connection_is_no_answer_and_the_next_poll_is_over_a_new_one() -> None:
    async def what(server: Server, client: Client) -> None:
        for _ in range(2):
            assert (await client.poll(server.url)).ok
        client.limit_s = 0.3
        answer = await client.poll(server.url)
        assert (answer.status, answer.accepted) == (0, True)
        assert "no answer" in answer.error
        client.limit_s = 30.0
        assert (await client.poll(server.url)).ok

    server = with_server(lambda connection, request: "silence" if (connection, request) == (1, 1) else "answer", what)
    assert server.asked == [0, 1, 1, 2]


def test_a_kept_connection_hides_no_port_that_takes_no_more() -> None:
    """The listener is gone, or its queue full: whoever has a connection is served."""

    async def what(server: Server, client: Client) -> None:
        for _ in range(2):
            assert (await client.poll(server.url)).ok
        server.server.close()
        answers = [await client.poll(server.url) for _ in range(FRESH_EVERY)]
        failed = [answer for answer in answers if not answer.status]
        assert failed
        assert all(answer.error.startswith("cannot connect") and not answer.accepted for answer in failed)

    with_server(lambda connection, request: "answer", what)


def test_a_kept_connection_hides_no_frozen_acceptor() -> None:
    """New connections stand in the queue before `accept`: taken by the kernel, answered by nobody."""

    async def what(server: Server, client: Client) -> None:
        for _ in range(2):
            assert (await client.poll(server.url)).ok
        client.limit_s = 2.0
        answers = [await client.poll(server.url) for _ in range(FRESH_EVERY)]
        assert not all(answer.status for answer in answers)
        assert all(answer.accepted for answer in answers)

    with_server(lambda connection, request: "answer" if connection < 2 else "silence", what)


def test_loads_are_asked_for_seldom_while_counters_show_that_loops_turn() -> None:
    asked = 0
    turns = True

    async def go() -> None:
        nonlocal turns

        async def page(request: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            body = '{"timestamp": 1000.5, "loads": [{"timestamp": 998.0, "num_running_reqs": 2}]}'
            return web.Response(text=body)

        runner, url = await served({"/v1/loads": page})
        client = Client(30.0)
        pages = counters.CountersSignal(client)
        pages.turns = lambda name: turns  # type: ignore[method-assign]
        signal, seen = loads.LoadsSignal(client, pages), at(url)
        first = (await signal.read([seen], frozenset()))[seen.name]
        assert not isinstance(first, Blind)
        assert (await signal.read([seen], frozenset()))[seen.name] == first
        assert asked == 1
        await signal.read([seen], frozenset({seen.name}))
        assert asked == 2, "under suspicion it is"
        turns = False
        await signal.read([seen], frozenset())
        assert asked == 3, "where counters do not tell it is"
        await runner.cleanup()
        assert isinstance((await signal.read([seen], frozenset()))[seen.name], Blind)
        turns = True
        assert isinstance((await signal.read([seen], frozenset()))[seen.name], Blind), "what failed is not remembered"
        await client.close()

    asyncio.run(go())


def test_counters_that_grow_show_that_loops_turn() -> None:
    seconds = ["1.0", "1.5", "1.5", "2.0"]

    async def page(request: web.Request) -> web.Response:
        return web.Response(
            text=f'sglang:scheduler_stage_seconds_total{{tp_rank="0"}} {seconds.pop(0)}\nsglang:num_running_reqs 1\n'
        )

    async def go() -> list[bool]:
        runner, url = await served({"/metrics": page})
        client = Client(30.0)
        signal, found = counters.CountersSignal(client), []
        for _ in range(4):
            await signal.read([at(url)], frozenset())
            found.append(signal.turns(at(url).name))
        await runner.cleanup()
        await signal.read([at(url)], frozenset())
        found.append(signal.turns(at(url).name))
        await client.close()
        return found

    assert asyncio.run(go()) == [False, True, False, True, False]


def test_calls_share_a_thread_which_ends_when_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "IDLE_S", 0.2)

    def living() -> int:
        return sum(thread.name == "aside calls" for thread in threading.enumerate())

    async def go() -> None:
        calls = Aside("calls")
        idents = {await calls.run(threading.get_ident) for _ in range(20)}
        assert len(idents) == 1
        deadline = time.monotonic() + 30
        while living():
            assert time.monotonic() < deadline
            await asyncio.to_thread(time.sleep, 0.05)
        assert await calls.run(lambda: 7) == 7

    asyncio.run(go())


def row(pid: int, *argv: str, ppid: int = 1, state: str = "S") -> Row:
    return Row(pid, pid, ppid, pid, state, argv[0], argv)


def test_the_same_table_is_not_searched_again_and_every_other_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = row(100, "python3", "-m", "sglang.launch_server", "--port", "30000", "--disaggregation-mode", "decode")
    rank = row(101, "sglang::scheduler_TP0", ppid=100)
    tables = [{100: launcher, 101: rank}] * 5
    searched = 0

    def group(*how: object) -> object:
        nonlocal searched
        searched += 1
        return grouped(*how)  # type: ignore[arg-type]

    grouped = discover.group
    monkeypatch.setattr(discover, "group", group)
    monkeypatch.setattr(discover.procfs, "scan", lambda known, again: dict(tables.pop(0)))
    finder = Finder()
    found = [finder.find() for _ in range(5)]
    assert searched == 2
    assert {e.name for engines in found[1:] for e in engines} == {"decode-30000"}
    tables[:] = [{100: launcher}, {100: launcher}, {}, {}]
    assert [p.label for p in finder.find()[0].procs] == ["launcher", "TP0"], "one that ended stays listed"
    assert [p.label for p in finder.find()[0].procs] == ["launcher", "TP0"]
    assert (finder.find(), finder.find()) == ((), ())
