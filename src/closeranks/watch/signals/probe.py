"""The active probe: one short request through the real prefill → decode path, with real KV transfer and its own id.

Health endpoints do not cross the KV path; this does. It succeeds when a token comes out at the end, whatever the status
says. A probe that does not end in time is given up by closing its connection, and SGLang's is aborted by its id on both
sides. Its failure says something only while the counters do not move either: a saturated pair fails probes in good
health.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from closeranks.watch.answers import completed, generated, given_up
from closeranks.watch.discover import MOST_PORTS, flag, number
from closeranks.watch.signals import Readings
from closeranks.watch.signals.fetch import Answer, Client
from closeranks.watch.snapshot import Blind, EngineSeen, Values
from closeranks.watch.snapshot import Signal as SignalName

PREFIX = "closeranks-probe-"
"""Of the ids of probes where the endpoint takes one, so that they can be told from users' requests, and aborted."""
LIMIT_S = 6.0
"""A short request on a sound path takes a fraction of that; on a saturated one perhaps not, but then counters move."""
PROMPT = "1 2 3 4 5 6 7 8"


class _Came(msgspec.Struct, frozen=True):
    """`said`: "" when a token came, else what came instead. `answered`: it was said over HTTP, not left to time out."""

    said: str
    answered: bool


Came = _Came | None
"""None: a request cannot be sent there."""


class ProbeSignal:
    """Key: every engine that a path crosses: `at, began, ok, answered, seconds, said`. `answered`: every side of the
    path said something, be it an error. Of an engine on several paths one that succeeds is told.

    `mode`: `never`, `suspect` (only while an engine is under suspicion) or `always`.
    """

    name: SignalName = "probe"
    limit_s = LIMIT_S + 6

    def __init__(self, client: Client, mode: str = "suspect", url: str = "", every_s: float = 15.0) -> None:
        self._client, self._mode, self._url = client, mode, url.rstrip("/")
        self.every_s = every_s
        self._models: dict[str, str] = {}

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """Probe each path once."""
        if self._mode == "never":
            return {e.name: Blind("probes are switched off") for e in engines}
        if self._mode == "suspect" and not urgent:
            return {}
        found: Readings = {}
        for path in self.paths(engines):
            if self._mode == "suspect" and not urgent & {e.name for e in path}:
                continue
            began = time.monotonic()
            came = await self._probe(path)
            at = time.monotonic()
            for engine in path:
                old = found.get(engine.name)
                if isinstance(old, Mapping) and old["ok"]:
                    continue
                found[engine.name] = _told(came, began, at)
        return found

    def paths(self, engines: Sequence[EngineSeen]) -> list[tuple[EngineSeen, ...]]:
        """The paths to probe: all through the given router, or each pair, or each engine that does both."""
        if self._url:
            return [tuple(engines)] if engines else []
        found: list[tuple[EngineSeen, ...]] = []
        ours = [e for e in engines if e.kind == "closeranks"]
        found += [tuple(e for e in ours if e.url == url) for url in sorted({e.url for e in ours if e.url})]
        for kind in ("sglang", "vllm"):
            same = [e for e in engines if e.kind == kind and e.url]
            prefills = [e for e in same if e.role == "prefill"]
            found += [(p, d) for d in same if d.role == "decode" for p in prefills]
            found += [(e,) for e in same if e.role == "both"]
        return found

    async def _probe(self, path: tuple[EngineSeen, ...]) -> Came:
        """What came of one request."""
        if self._url or path[0].kind == "closeranks":
            return await self._completion(self._url or str(path[0].url))
        if len(path) == 2:
            pair = self._sglang_pair if path[0].kind == "sglang" else self._vllm_pair
            return await pair(*path)
        if path[0].kind == "sglang":
            rid = PREFIX + secrets.token_hex(6)
            answer = await self._client.post(f"{path[0].url}/generate", _generate(rid), LIMIT_S)
            await self._abort(path, rid, answer)
            return _came(answer, generated)
        return await self._completion(str(path[0].url))

    async def _completion(self, url: str) -> Came:
        body = {"model": await self._model(url), "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        return _came(await self._client.post(f"{url}/v1/completions", body, LIMIT_S), completed)

    async def _model(self, url: str) -> str:
        if url not in self._models:
            answer = await self._client.get(f"{url}/v1/models")
            try:
                self._models[url] = str(answer.json()["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                return "default"
        return self._models[url]

    async def _sglang_pair(self, prefill: EngineSeen, decode: EngineSeen) -> Came:
        """What the router does: the same request to both, with one room."""
        rid = PREFIX + secrets.token_hex(6)
        port = number(flag(prefill.argv, "--disaggregation-bootstrap-port"), MOST_PORTS)
        body = _generate(rid) | {
            "bootstrap_host": urlsplit(str(prefill.url)).hostname,
            "bootstrap_port": port or 8998,
            "bootstrap_room": secrets.randbits(62),
        }
        answers = await asyncio.gather(
            *(self._client.post(f"{engine.url}/generate", body, LIMIT_S) for engine in (prefill, decode))
        )
        for answer in answers:
            await self._abort((prefill, decode), rid, answer)
        return _worst((_came(answers[0], _prefilled), _came(answers[1], generated)))

    async def _abort(self, path: Sequence[EngineSeen], rid: str, answer: Answer) -> None:
        """End what did not end in time, on both sides."""
        if not answer.ok and answer.accepted:
            await asyncio.gather(*(self._client.post(f"{e.url}/abort_request", {"rid": rid}, 2.0) for e in path))

    async def _vllm_pair(self, prefill: EngineSeen, decode: EngineSeen) -> Came:
        """Prefill with one token, then decode with the transfer parameters of its answer."""
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": False}
        body["model"] = await self._model(str(prefill.url))
        body["request_id"] = PREFIX + secrets.token_hex(6)
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        first = await self._client.post(
            f"{prefill.url}/v1/completions", body | {"kv_transfer_params": ask | nothing}, LIMIT_S
        )
        came = _came(first, _handed)
        if came is None or came.said:
            return came
        body["kv_transfer_params"] = first.json()["kv_transfer_params"]
        return _came(await self._client.post(f"{decode.url}/v1/completions", body, LIMIT_S), completed)


def _generate(rid: str) -> dict[str, Any]:
    return {"text": PROMPT, "rid": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


def _came(answer: Answer, sound: Callable[[Any], bool]) -> Came:
    """What came, by whether a 200 holds what it should; None when the server has no such endpoint or wants a key."""
    if answer.status in (401, 403, 404, 405):
        return None
    answered = answer.status > 0
    if not answer.ok:
        return _Came(answer.said, answered)
    return _Came("" if sound(answer.json()) else "HTTP 200, without what a completion holds", answered)


def _worst(legs: Sequence[Came]) -> Came:
    """What came of a path whose legs are asked at once: it succeeds, and is answered, when all are."""
    known = [leg for leg in legs if leg is not None]
    if len(known) < len(legs):
        return None
    return _Came(next((leg.said for leg in known if leg.said), ""), all(leg.answered for leg in known))


def _prefilled(said: Any) -> bool:
    """Of prefill's own answer, whose token decode gives: that it is one, and was not given up."""
    return isinstance(said, Mapping) and bool(said) and "error" not in said and not given_up(said)


def _handed(said: Any) -> bool:
    return isinstance(said, Mapping) and bool(said.get("kv_transfer_params"))


def _told(came: Came, began: float, at: float) -> Values | Blind:
    if came is None:
        return Blind("no way to send a request through it: give --probe-url")
    times = {"at": at, "began": began, "seconds": at - began}
    return {**times, "ok": came.said == "", "answered": came.answered, "said": came.said}
