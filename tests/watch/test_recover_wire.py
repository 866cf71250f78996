"""What is said to routers and engines, over real sockets; a status alone is never taken for a token."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from closeranks.watch import recover_wire
from closeranks.watch.recover_wire import PREFIX, Answer, Endpoint, StepFailed, Wire, endpoint_of, pairs
from closeranks.watch.snapshot import EngineSeen

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine decides no test."""
    for name in ("ASIDE_S", "ROUTER_S", "HEALTH_S"):
        monkeypatch.setattr(recover_wire, name, 60.0)


class Server:
    """Answers by path, remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.asked.append((request.method, request.path, body))
        answer = self.answers.get(f"{request.method} {request.path}", (404, {}))
        if callable(answer):
            answer = await answer(body)
        status, payload = answer
        if isinstance(payload, str):
            return web.Response(text=payload, status=status)
        return web.json_response(payload, status=status)


@asynccontextmanager
async def servers(count: int) -> Any:
    made, runners = [Server() for _ in range(count)], []
    for server in made:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        runners.append(runner)
    try:
        yield made
    finally:
        for runner in runners:
            await runner.cleanup()


def ends(kind: str, prefill: Server, decode: Server) -> dict[str, Endpoint]:
    return {
        "p": Endpoint(name="p", kind=kind, role="prefill", url=prefill.url, bootstrap_port=8999, key="sk-topsecret123"),
        "d": Endpoint(name="d", kind=kind, role="decode", url=decode.url),
    }


def tokens(count: int, reason: str = "length") -> tuple[int, dict[str, Any]]:
    return 200, {"text": " a" * count, "meta_info": {"completion_tokens": count, "finish_reason": {"type": reason}}}


def test_sglang_is_asked_on_both_sides_with_one_fresh_room() -> None:
    async def main() -> None:
        async with servers(2) as (prefill, decode):
            for server in (prefill, decode):
                server.answers["POST /generate"] = tokens(2)
            wire = Wire()
            said = await wire.check(["d"], ends("sglang", prefill, decode), 60.0, at_once=3)
            await wire.close()
            assert said.startswith("3 request(s)")
            sent = [[body for _, path, body in s.asked if path == "/generate"] for s in (prefill, decode)]
            rooms = [sorted(body["bootstrap_room"] for body in bodies) for bodies in sent]
            assert rooms[0] == rooms[1]
            assert len(set(rooms[0])) == 3
            assert all(b["bootstrap_port"] == 8999 and b["rid"].startswith(PREFIX) for b in sent[0] + sent[1])

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer", [(503, {}), (200, {}), (200, []), tokens(0), tokens(1, "abort"), (200, {"meta_info": None})]
)
def test_a_status_without_a_token_is_no_success_and_the_request_is_ended(answer: Any) -> None:
    async def main() -> None:
        async with servers(2) as (prefill, decode):
            prefill.answers["POST /generate"] = tokens(1)
            decode.answers["POST /generate"] = answer
            wire = Wire()
            with pytest.raises(StepFailed, match="p → d") as raised:
                await wire.check(["d"], ends("sglang", prefill, decode), 60.0)
            await wire.close()
            assert "topsecret" not in str(raised.value)
            for server in (prefill, decode):
                (aborted,) = [body for _, path, body in server.asked if path == "/abort_request"]
                assert aborted["rid"].startswith(PREFIX), "only our own request"

    asyncio.run(main())


def test_one_that_hangs_fails_in_time_and_is_ended() -> None:
    async def main() -> None:
        async def never(body: Any) -> Any:
            await asyncio.sleep(60)

        async with servers(2) as (prefill, decode):
            prefill.answers["POST /generate"] = tokens(1)
            decode.answers["POST /generate"] = never
            wire = Wire()
            with pytest.raises(StepFailed, match="did not answer"):
                await wire.check(["p"], ends("sglang", prefill, decode), 0.3)
            await wire.close()
            assert [path for _, path, _ in decode.asked] == ["/generate", "/abort_request"]

    asyncio.run(main())


def test_vllm_hands_over_what_prefill_gave() -> None:
    async def main() -> None:
        async with servers(2) as (prefill, decode):
            given = {"remote_engine_id": "e", "remote_block_ids": [1]}
            prefill.answers["POST /v1/completions"] = (200, {"kv_transfer_params": given, "choices": [{"text": "a"}]})
            decode.answers["POST /v1/completions"] = (200, {"choices": [{"text": " Paris"}]})
            decode.answers["GET /v1/models"] = (200, {"data": [{"id": "m"}]})
            wire = Wire()
            both = ends("vllm", prefill, decode)
            await wire.check(["d"], both, 60.0)
            assert prefill.asked[0][2]["kv_transfer_params"]["do_remote_decode"] is True
            assert decode.asked[-1][2]["kv_transfer_params"] == given
            assert decode.asked[-1][2]["model"] == "m"
            prefill.answers["POST /v1/completions"] = (200, {"choices": [{"text": "a"}]})
            with pytest.raises(StepFailed, match="handed nothing over"):
                await wire.check(["d"], both, 60.0)
            await wire.close()

    asyncio.run(main())


def test_of_several_pairs_one_is_enough_unless_all_are_named() -> None:
    async def main() -> None:
        async with servers(3) as (prefill, decode, other):
            for server in (prefill, decode):
                server.answers["POST /generate"] = tokens(1)
            three = ends("sglang", prefill, decode)
            three["q"] = Endpoint(name="q", kind="sglang", role="prefill", url=other.url)  # of another service
            wire = Wire()
            await wire.check(["d"], three, 60.0)
            with pytest.raises(StepFailed):
                await wire.check(["d"], three, 60.0, every=True)
            await wire.close()

    asyncio.run(main())


def test_without_a_path_nothing_is_called_checked() -> None:
    async def main() -> None:
        wire = Wire()
        alone = {"d": Endpoint(name="d", kind="sglang", role="decode", url="http://127.0.0.1:1")}
        with pytest.raises(StepFailed, match="its other side is not seen"):
            await wire.check(["d"], alone, 60.0)
        await wire.close()

    asyncio.run(main())


def listed(*urls: str, healthy: bool = True) -> tuple[int, dict[str, Any]]:
    workers = [{"id": f"id-{n}", "url": url, "is_healthy": healthy, "priority": 70} for n, url in enumerate(urls)]
    return 200, {"workers": workers}


def test_a_router_is_drained_and_the_worker_comes_back_as_it_was() -> None:
    async def main() -> None:
        async with servers(2) as (router, engine):
            one = Endpoint(name="p", kind="sglang", role="prefill", url=engine.url, bootstrap_port=8999)
            router.answers["GET /workers"] = listed("http://127.0.0.1:1", engine.url)
            router.answers["DELETE /workers/id-1"] = (202, {})
            wire = Wire(router.url)
            one = (await wire.listed({"p": one}))["p"]
            assert "id-1" in await wire.drain(one)
            await wire.close()  # recovery is killed here; what it kept of the engine is enough for another
            wire, one = Wire(router.url), msgspec.json.decode(msgspec.json.encode(one), type=Endpoint)
            router.answers["GET /workers"] = listed("http://127.0.0.1:1")
            added: list[Any] = []

            async def add(body: Any) -> Any:
                added.append(body)
                router.answers["GET /workers"] = listed("http://127.0.0.1:1", engine.url)
                return 202, {}

            router.answers["POST /workers"] = add
            assert await wire.admit(one, 60.0) == "back in the router"
            assert added == [{"url": engine.url, "worker_type": "prefill", "priority": 70, "bootstrap_port": 8999}]
            await wire.close()

    asyncio.run(main())


def test_a_router_that_does_not_call_it_healthy_is_not_believed() -> None:
    async def main() -> None:
        async with servers(2) as (router, engine):
            one = Endpoint(name="d", kind="sglang", role="decode", url=engine.url)
            router.answers["GET /workers"] = listed(engine.url, healthy=False)
            wire = Wire(router.url)
            with pytest.raises(StepFailed, match="does not call d healthy"):
                await wire.admit(one, 0.2)
            await wire.close()

    asyncio.run(main())


def test_one_that_was_taken_out_is_out_while_the_router_does_not_answer() -> None:
    async def main() -> None:
        async with servers(2) as (router, engine):
            one = Endpoint(name="d", kind="sglang", role="decode", url=engine.url)
            router.answers["GET /workers"] = listed(engine.url)
            router.answers["DELETE /workers/id-0"] = (202, {})
            wire = Wire(router.url)
            one = (await wire.listed({"d": one}))["d"]
            await wire.drain(one)
            await wire.close()
            wire = Wire(router.url)
            router.answers["GET /workers"] = (503, {})
            with pytest.raises(StepFailed, match="no list of workers"):
                await wire.admit(one, 1.0)
            await wire.close()

    asyncio.run(main())


def test_one_that_the_router_did_not_list_is_not_taken_out() -> None:
    """How it was listed would not be known afterwards."""

    async def main() -> None:
        async with servers(2) as (router, engine):
            one = Endpoint(name="d", kind="sglang", role="decode", url=engine.url)
            wire = Wire(router.url)
            router.answers["GET /workers"] = (503, {})
            one = (await wire.listed({"d": one}))["d"]
            router.answers["GET /workers"] = listed(engine.url)
            with pytest.raises(StepFailed, match="did not list"):
                await wire.drain(one)
            await wire.close()

    asyncio.run(main())


def test_a_router_without_that_interface_is_said() -> None:
    async def main() -> None:
        async with servers(1) as (router,):
            one = Endpoint(name="d", kind="sglang", role="decode", url="http://127.0.0.1:1")
            wire = Wire(router.url)
            with pytest.raises(StepFailed, match="no list of workers"):
                await wire.drain(one)
            assert "never out of rotation" in await wire.admit(one, 1.0)
            await wire.close()

    asyncio.run(main())


def test_aborts_and_health_and_versions() -> None:
    async def main() -> None:
        async with servers(1) as (engine,):
            engine.answers["POST /abort_request"] = (200, {})
            engine.answers["GET /health"] = (200, {})
            engine.answers["GET /server_info"] = (200, {"version": "0.5.23"})
            wire = Wire()
            one = Endpoint(name="d", kind="sglang", role="decode", url=engine.url)
            await wire.abort(one)
            assert engine.asked[0][2] == {"rid": "", "abort_all": True}
            assert await wire.ready(one)
            assert await wire.version(one) == "0.5.23"
            gone = Endpoint(name="d", kind="sglang", role="decode", url="http://127.0.0.1:1")
            assert not await wire.ready(gone)
            assert await wire.version(gone) == ""
            with pytest.raises(StepFailed):
                await wire.abort(gone)
            await wire.close()

    asyncio.run(main())


def test_our_own_engine_is_ready_in_its_next_life_only() -> None:
    """Right after the end of an engine its gateway still takes it for ready: it has not been told yet."""

    async def main() -> None:
        async with servers(1) as (gateway,):
            gateway.answers["GET /ready"] = (200, {})
            wire = Wire()
            one = Endpoint(name="decode-8000", kind="closeranks", role="decode", url=gateway.url, own_name="decode")
            for page, epoch in (("", None), ('closeranks_epoch{engine="prefill"} 9\n', None),
                                ('closeranks_epoch{engine="decode"} 3.0\n', 3)):  # fmt: skip
                gateway.answers["GET /metrics"] = (200, page)
                assert await wire.epoch(one) == epoch
            one = msgspec.structs.replace(one, epoch=3)
            assert not await wire.ready(one)
            gateway.answers["GET /metrics"] = (200, 'closeranks_epoch{engine="decode"} 4.0\n')
            assert await wire.ready(one)
            gateway.answers["GET /ready"] = (503, {})
            assert not await wire.ready(one)
            assert await wire.epoch(msgspec.structs.replace(one, url="http://127.0.0.1:1")) is None
            await wire.close()

    asyncio.run(main())


def test_behind_its_own_gateway_nothing_is_drained() -> None:
    async def main() -> None:
        async with servers(1) as (router,):
            wire = Wire(router.url)
            one = Endpoint(name="decode", kind="closeranks", role="decode", url="http://127.0.0.1:1", supervised=True)
            assert "holds requests" in await wire.drain(one)
            assert "takes it back" in await wire.admit(one, 1.0)
            assert router.asked == []
            await wire.close()

    asyncio.run(main())


def test_engines_of_another_model_or_kind_are_no_pair() -> None:
    argv = ("python", "-m", "sglang.launch_server", "--model-path", "a", "--api-key", "k")
    prefill = endpoint_of(EngineSeen("p", "sglang", "prefill", "http://h:1/", (), argv, backend="nixl"))
    decode = endpoint_of(EngineSeen("d", "sglang", "decode", "http://h:2", (), argv, backend="nixl"))
    other = endpoint_of(EngineSeen("q", "sglang", "prefill", "http://h:3", (), (*argv[:4], "b"), backend="nixl"))
    assert prefill.url == "http://h:1"
    assert prefill.headers == {"Authorization": "Bearer k"}
    every = {e.name: e for e in (prefill, decode, other)}
    assert [(p.name, d.name) for p, d in pairs(decode, every)] == [("p", "d")]
    assert pairs(other, every) == []


def test_what_is_no_json_is_nothing() -> None:
    assert Answer(200, b"<html>").json() == {}
