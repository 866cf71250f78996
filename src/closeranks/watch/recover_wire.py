"""What recovery says over HTTP: to routers (drain, admit), to engines (abort, ready, a request through the real path).

A check request goes the way of a real one: with SGLang to prefill and decode at once with a fresh room, with vLLM to
prefill and, with what that answers, to decode, else to the engine's or the router's completions. It counts when a token
comes out at the end, not when a status does. Its prompt is fixed, its ids carry a prefix of their own.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from closeranks.watch.answers import completed, generated
from closeranks.watch.discover import MOST_PORTS, flag, number
from closeranks.watch.signals.fetch import PLAIN, REDIRECTS
from closeranks.watch.signals.steps import parse
from closeranks.watch.snapshot import EngineSeen

PREFIX = "closeranks-check-"
PROMPT = "The capital of France is"
ANSWER_BYTES = 1 << 20
LOOK_S = 0.5
ROUTER_S = 10.0
HEALTH_S = 25.0
"""SGLang's own probe gives up after 20 s."""
ASIDE_S = 2.0
"""For questions on the side: a version, the end of our own request. Without an answer recovery goes on."""


class StepFailed(RuntimeError):
    """A step over HTTP did not do what it should. The text says what came back."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine answers. Holds its key, so it is never shown."""

    name: str
    kind: str
    role: str
    url: str
    group: str = ""
    """As of `Side`."""
    bootstrap_port: int = 8998
    key: str = ""
    listed: dict[str, Any] | None = None
    """As the router listed it when the plan was made; None: it did not, so nothing takes it out."""
    supervised: bool = False
    """One of closeranks' own, behind a gateway that is not ended with it or comes back by itself."""
    own_name: str = ""
    """Of closeranks' own engines: as `EngineSeen` has it."""
    epoch: int | None = None
    """Of closeranks' own engines: the life that is to be ended; None: not known."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def endpoint_of(engine: EngineSeen) -> Endpoint:
    """From what discovery saw."""
    port = number(flag(engine.argv, "--disaggregation-bootstrap-port"), MOST_PORTS)
    return Endpoint(
        name=engine.name,
        kind=engine.kind,
        role=engine.role,
        url=(engine.url or "").rstrip("/"),
        group=group_of(engine),
        bootstrap_port=port or 8998,
        key=flag(engine.argv, "--api-key") or "",
    )


def _own(workers: Sequence[dict[str, Any]], one: Endpoint) -> dict[str, Any] | None:
    """The engine in a router's list, by its address."""
    return next((worker for worker in workers if str(worker.get("url", "")).rstrip("/") == one.url), None)


def group_of(engine: EngineSeen) -> str:
    """What engines that hand over to each other have in common, by their flags."""
    return f"{flag(engine.argv, '--model-path', '--model') or ''} {engine.backend}"


class Answer(msgspec.Struct, frozen=True):
    """Status and body, as far as it was read."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body decoded; an empty mapping if it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return {}


class Wire:
    """HTTP with a time limit on everything. One per plan; close it."""

    def __init__(self, router: str = "", router_key: str = "") -> None:
        self.router = router.rstrip("/")
        self._router_headers = {"Authorization": f"Bearer {router_key}"} if router_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def version(self, one: Endpoint) -> str:
        """The engine's own word for its version; empty if it does not say in time."""
        for path in ("/version",) if one.kind == "vllm" else ("/server_info", "/get_server_info"):
            try:
                said = (await self._call("GET", one.url + path, ASIDE_S, headers=one.headers)).json()
            except StepFailed:
                continue
            if isinstance(said, dict) and isinstance(said.get("version"), str):
                return str(said["version"])
        return ""

    async def listed(self, ends: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """The same with what the router says of each, for `admit` of a later life of this process too."""
        if not self.router:
            return dict(ends)
        try:
            workers = await self._workers()
        except StepFailed:
            return dict(ends)  # `drain` will ask again and say it
        return {name: msgspec.structs.replace(one, listed=_own(workers, one)) for name, one in ends.items()}

    async def drain(self, one: Endpoint) -> str:
        """Take the engine out of the router, where that can be told so. Raises StepFailed."""
        if one.supervised:
            return "its own gateway holds requests until it is back"
        if not self.router:
            return "no router is known: requests of this time fail or wait"
        known = _own(await self._workers(), one)
        if known is None:
            return f"the router does not list {one.url}"
        if one.listed is None:
            raise StepFailed(f"the router did not list {one.url} when the plan was made: not taken out")
        worker = str(known.get("id") or one.url)
        answer = await self._call(
            "DELETE", f"{self.router}/workers/{quote(worker, safe='')}", ROUTER_S, headers=self._router_headers
        )
        if answer.status >= 300:
            raise StepFailed(f"the router did not take {one.name} out: {answer.status}")
        return f"taken out of the router (worker {worker})"

    async def admit(self, one: Endpoint, limit_s: float) -> str:
        """Put the engine back into the router and wait until that calls it healthy. Raises StepFailed."""
        if one.supervised:
            return "its own gateway takes it back"
        if not self.router:
            return "no router is known: it was never out of rotation"
        try:
            known = _own(await self._workers(), one)
        except StepFailed as error:
            if one.listed is not None:  # it may be out, whatever keeps the router from saying so
                raise
            return f"{error}: it was never out of rotation"
        if known is None:
            old = one.listed or {}
            wanted: dict[str, Any] = {"url": one.url, "worker_type": one.role if one.role != "both" else "regular"}
            wanted |= {k: old[k] for k in ("priority", "cost", "labels", "model_id") if old.get(k) is not None}
            if one.role == "prefill" and one.kind == "sglang":
                wanted["bootstrap_port"] = one.bootstrap_port
            if one.key:
                wanted["api_key"] = one.key
            answer = await self._call(
                "POST", f"{self.router}/workers", ROUTER_S, json_body=wanted, headers=self._router_headers
            )
            if answer.status >= 300:
                raise StepFailed(f"the router did not take {one.name} back: {answer.status}")
        until = time.monotonic() + limit_s
        while True:
            known = _own(await self._workers(), one)
            if known is not None and known.get("is_healthy", True):
                return "back in the router"
            if time.monotonic() > until:
                raise StepFailed(f"the router does not call {one.name} healthy within {limit_s:.0f} s")
            await asyncio.sleep(LOOK_S)

    async def _workers(self) -> list[dict[str, Any]]:
        answer = await self._call("GET", f"{self.router}/workers", ROUTER_S, headers=self._router_headers)
        if answer.status != 200:
            raise StepFailed(f"the router has no list of workers ({answer.status} at /workers)")
        listed = answer.json()
        workers = listed.get("workers") if isinstance(listed, dict) else None
        return [worker for worker in workers if isinstance(worker, dict)] if isinstance(workers, list) else []

    async def abort(self, one: Endpoint) -> str:
        """End every request of the engine, where it has a way to be told. Raises StepFailed."""
        if one.kind != "sglang":
            return f"{one.kind} has no such request: its own deadlines end them"
        answer = await self._call(
            "POST", f"{one.url}/abort_request", ROUTER_S, json_body={"rid": "", "abort_all": True}, headers=one.headers
        )
        if answer.status >= 300:
            raise StepFailed(f"{one.name} answered {answer.status} to the abort")
        return "all its requests were told to end"

    async def ready(self, one: Endpoint) -> bool:
        """Whether the engine's own health says 200 now. It is asked for nothing more: the check follows.

        closeranks' gateway is asked whether tokens can flow, and its engine must be in a later life than the one that
        was ended: the gateway may not have noticed that yet.
        """
        if not one.url:
            return False
        path = "/ready" if one.kind == "closeranks" else "/health"
        try:
            if (await self._call("GET", one.url + path, HEALTH_S, headers=one.headers)).status != 200:
                return False
        except StepFailed:
            return False
        return one.epoch is None or (await self.epoch(one) or 0) > one.epoch

    async def epoch(self, one: Endpoint) -> int | None:
        """Which life an engine of closeranks' is in, by its gateway's metrics; None when those do not tell."""
        if not one.url:
            return None
        try:
            page = await self._call("GET", f"{one.url}/metrics", ASIDE_S)
        except StepFailed:
            return None
        said = parse(page.body).get(one.own_name, {})
        return int(said["epoch"]) if "epoch" in said else None

    async def check(
        self, names: Sequence[str], ends: Mapping[str, Endpoint], limit_s: float, at_once: int = 1, every: bool = False
    ) -> str:
        """Requests through the pairs of a prefill and a decode that each of `names` can be part of, `at_once` times.

        `every`: all pairs must carry them; else one for each engine is enough, because another may belong to another
        service. Engines that do both are asked by themselves, closeranks' through their gateway. Raises StepFailed
        when a token does not come, and when there is no path to check.
        """
        began, asked = time.monotonic(), 0
        for name in names:
            ways = self._ways(ends[name], ends, limit_s)
            if not ways and self.router:
                ways = [lambda: self.through_router(limit_s)]
            if not ways:
                raise StepFailed(f"{name} was not checked: its other side is not seen here, and no router is known")
            runs = [asyncio.gather(*(way() for _ in range(at_once))) for way in ways]
            failed = [r for r in await asyncio.gather(*runs, return_exceptions=True) if isinstance(r, BaseException)]
            if failed and (every or len(failed) == len(ways)):
                raise failed[0]
            asked += (len(ways) - len(failed)) * at_once
        took = time.monotonic() - began
        return f"{asked} request(s) through the real path answered with tokens in {took:.2f} s"

    def _ways(self, one: Endpoint, ends: Mapping[str, Endpoint], limit_s: float) -> list[Callable[[], Awaitable[None]]]:
        if not one.url:
            return []
        if one.role == "both" or one.kind == "closeranks":
            return [partial(self._completion, one.url, one.headers, limit_s)]
        return [partial(self._pair, prefill, decode, limit_s) for prefill, decode in pairs(one, ends)]

    async def through_router(self, limit_s: float) -> None:
        """One completion through the router. Raises StepFailed."""
        await self._completion(self.router, self._router_headers, limit_s)

    async def _pair(self, prefill: Endpoint, decode: Endpoint, limit_s: float) -> None:
        way = self._sglang_pair if prefill.kind == "sglang" else self._vllm_pair
        try:
            await way(prefill, decode, limit_s)
        except StepFailed as error:
            raise StepFailed(f"{prefill.name} → {decode.name}: {error}") from None

    async def _sglang_pair(self, prefill: Endpoint, decode: Endpoint, limit_s: float) -> None:
        rid = PREFIX + secrets.token_hex(8)
        body = {
            "rid": rid,
            "text": PROMPT,
            "sampling_params": {"max_new_tokens": 2, "temperature": 0},
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }
        both = [
            asyncio.ensure_future(
                self._call("POST", f"{end.url}/generate", limit_s, json_body=body, headers=end.headers)
            )
            for end in (prefill, decode)
        ]
        try:
            answers = await asyncio.gather(*both)
            said = answers[1].json()
            if answers[0].status != 200:
                raise StepFailed(f"prefill answered {answers[0].status}")
            if answers[1].status != 200 or not generated(said):
                raise StepFailed(f"no token came out of decode (status {answers[1].status})")
        except StepFailed:
            await self._abort_ours((prefill, decode), rid)
            raise
        finally:
            for task in both:
                task.cancel()

    async def _abort_ours(self, ends: Sequence[Endpoint], rid: str) -> None:
        """End our own check request on both sides; engines that do not answer have nothing to lose by it."""
        calls = [
            self._call("POST", f"{e.url}/abort_request", ASIDE_S, json_body={"rid": rid}, headers=e.headers)
            for e in ends
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _vllm_pair(self, prefill: Endpoint, decode: Endpoint, limit_s: float) -> None:
        model = await self._model(decode.url, decode.headers, limit_s)
        base = {"model": model, "prompt": PROMPT, "temperature": 0}
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        ask = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
        first = await self._call(
            "POST",
            f"{prefill.url}/v1/completions",
            limit_s,
            json_body={**base, "max_tokens": 1, "kv_transfer_params": ask},
            headers=prefill.headers,
        )
        handed = first.json().get("kv_transfer_params") if isinstance(first.json(), dict) else None
        if first.status != 200 or not handed:
            raise StepFailed(f"prefill handed nothing over (status {first.status})")
        second = await self._call(
            "POST",
            f"{decode.url}/v1/completions",
            limit_s,
            json_body={**base, "max_tokens": 2, "kv_transfer_params": handed},
            headers=decode.headers,
        )
        _expect_text(second)

    async def _completion(self, url: str, headers: Mapping[str, str], limit_s: float) -> None:
        model = await self._model(url, headers, limit_s)
        body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        _expect_text(await self._call("POST", f"{url}/v1/completions", limit_s, json_body=body, headers=headers))

    async def _model(self, url: str, headers: Mapping[str, str], limit_s: float) -> str:
        answer = await self._call("GET", f"{url}/v1/models", limit_s, headers=headers)
        said = answer.json()
        listed = said.get("data") if isinstance(said, dict) else None
        if isinstance(listed, list) and listed and isinstance(listed[0], dict):
            return str(listed[0].get("id", "default"))
        return "default"

    async def _call(
        self,
        method: str,
        url: str,
        limit_s: float,
        *,
        json_body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=PLAIN, trust_env=False, auto_decompress=False)
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, url, json=json_body, headers=headers, max_redirects=REDIRECTS) as answer,
            ):
                body = bytearray()
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > ANSWER_BYTES:
                        break
                return Answer(answer.status, bytes(body))
        except TimeoutError as error:
            raise StepFailed(f"{_shown(url)} did not answer in {limit_s:.0f} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise StepFailed(f"{_shown(url)}: {type(error).__name__}: {error}") from error


def pairs(one: Endpoint, ends: Mapping[str, Endpoint]) -> list[tuple[Endpoint, Endpoint]]:
    """(prefill, decode) that this engine can be part of: same kind, model and backend."""
    found = []
    for other in ends.values():
        prefill, decode = (one, other) if one.role == "prefill" else (other, one)
        alike = (prefill.kind, prefill.group) == (decode.kind, decode.group) and prefill.kind in ("sglang", "vllm")
        if alike and prefill.role == "prefill" and decode.role == "decode" and prefill.url and decode.url:
            found.append((prefill, decode))
    return found


def _expect_text(answer: Answer) -> None:
    if answer.status != 200 or not completed(answer.json()):
        raise StepFailed(f"no token came back (status {answer.status})")


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"
