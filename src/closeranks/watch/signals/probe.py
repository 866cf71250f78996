"""The active probe: one short request through the real prefill → decode path, with real KV transfer and its own id.

Health endpoints do not cross the KV path; this does. A probe that does not end in time is given up by closing its
connection, and SGLang's is aborted by its id on both sides. Its failure says something only while the counters do not
move either: a saturated pair fails probes in good health.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from closeranks.watch.discover import MOST_PORTS, flag, number
from closeranks.watch.signals import Readings
from closeranks.watch.signals.fetch import Answer, Client
from closeranks.watch.snapshot import Blind, EngineSeen
from closeranks.watch.snapshot import Signal as SignalName

PREFIX = "closeranks-probe-"
"""Of the ids of probes where the endpoint takes one, so that they can be told from users' requests, and aborted."""
LIMIT_S = 6.0
"""A short request on a sound path takes a fraction of that; on a saturated one perhaps not, but then counters move."""
PROMPT = "1 2 3 4 5 6 7 8"


class ProbeSignal:
    """Key: every engine that the path crosses: `at, began, ok, seconds, said`.

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
            said = await self._probe(path)
            at = time.monotonic()
            for engine in path:
                if said is None:
                    found[engine.name] = Blind("no way to send a request through it: give --probe-url")
                else:
                    ok = said == ""
                    found[engine.name] = {"at": at, "began": began, "ok": ok, "seconds": at - began, "said": said}
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

    async def _probe(self, path: tuple[EngineSeen, ...]) -> str | None:
        """ "" when a token came; else what came instead. None: not possible."""
        if self._url or path[0].kind == "closeranks":
            return await self._completion(self._url or str(path[0].url))
        if len(path) == 2:
            pair = self._sglang_pair if path[0].kind == "sglang" else self._vllm_pair
            return await pair(*path)
        if path[0].kind == "sglang":
            rid = PREFIX + secrets.token_hex(6)
            answer = await self._client.post(f"{path[0].url}/generate", _generate(rid), LIMIT_S)
            await self._abort(path, rid, answer)
            return _said(answer)
        return await self._completion(str(path[0].url))

    async def _completion(self, url: str) -> str | None:
        body = {"model": await self._model(url), "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        return _said(await self._client.post(f"{url}/v1/completions", body, LIMIT_S))

    async def _model(self, url: str) -> str:
        if url not in self._models:
            answer = await self._client.get(f"{url}/v1/models")
            try:
                self._models[url] = str(answer.json()["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                return "default"
        return self._models[url]

    async def _sglang_pair(self, prefill: EngineSeen, decode: EngineSeen) -> str | None:
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
        said = [_said(answer) for answer in answers]
        return None if None in said else next((words for words in said if words), "")

    async def _abort(self, path: Sequence[EngineSeen], rid: str, answer: Answer) -> None:
        """End what did not end in time, on both sides."""
        if not answer.ok and answer.accepted:
            await asyncio.gather(*(self._client.post(f"{e.url}/abort_request", {"rid": rid}, 2.0) for e in path))

    async def _vllm_pair(self, prefill: EngineSeen, decode: EngineSeen) -> str | None:
        """Prefill with one token, then decode with the transfer parameters of its answer."""
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": False}
        body["model"] = await self._model(str(prefill.url))
        body["request_id"] = PREFIX + secrets.token_hex(6)
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        first = await self._client.post(
            f"{prefill.url}/v1/completions", body | {"kv_transfer_params": ask | nothing}, LIMIT_S
        )
        if not first.ok:
            return _said(first)
        try:
            params = first.json()["kv_transfer_params"]
        except (KeyError, TypeError):
            return "prefill gave no transfer parameters"
        return _said(
            await self._client.post(f"{decode.url}/v1/completions", body | {"kv_transfer_params": params}, LIMIT_S)
        )


def _generate(rid: str) -> dict[str, Any]:
    return {"text": PROMPT, "rid": rid, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


def _said(answer: Answer) -> str | None:
    """ "" when it succeeded, what came instead, or None when the server has no such endpoint or wants a key."""
    if answer.ok:
        return ""
    return None if answer.status in (401, 403, 404, 405) else answer.said
