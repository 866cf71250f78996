"""Processes of a served pair are killed or stopped under streams: they go on, and every token is right."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.reference import Expected, Reference
from tests.e2e.service import Served, serve

pytestmark = pytest.mark.slow
OUTPUT = 300


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Sequence[Expected]:
    draw = random.Random(5)
    reference = Reference(tiny_model)
    return [reference.continue_([draw.randrange(5, 500) for _ in range(n)], OUTPUT) for n in (3, 40, 77, 200)]


async def stream(session: aiohttp.ClientSession, url: str, e: Expected, seen: Callable[[], None]) -> None:
    """Read a stream to its end; every token must be the reference's, `usage` must count each once."""
    body = {"model": "default", "prompt": e.prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}  # fmt: skip
    ids: list[int] = []
    usage = None
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                seen()
                ids = choice.get("token_ids") or ids
    assert ids == e.tokens
    assert usage is not None
    assert usage["completion_tokens"] == OUTPUT
    assert usage["prompt_tokens"] == len(e.prompt)


def streams_through(served: Served, expected: Sequence[Expected], strike: Callable[[], None]) -> None:
    """Start all streams, strike once each has shown a token, and read all to their ends."""

    async def main() -> None:
        begun: dict[int, None] = {}
        struck = False

        def seen(i: int) -> None:
            nonlocal struck
            begun[i] = None
            if len(begun) == len(expected) and not struck:
                struck = True
                strike()

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:
            await asyncio.gather(
                *(stream(session, served.url, e, lambda i=i: seen(i)) for i, e in enumerate(expected))  # type: ignore[misc]
            )
        assert struck

    asyncio.run(main())


@pytest.mark.parametrize(
    ("engine", "process", "number"),
    [
        ("decode", "rank1", signal.SIGSTOP),
        ("decode", "leader", signal.SIGSTOP),
        ("prefill", "rank1", signal.SIGKILL),
    ],
)
def test_streams_go_on(
    engine: str, process: str, number: signal.Signals, tiny_model: Path, expected: Sequence[Expected]
) -> None:
    flags = ("--num-pages", 400, "--threads", 1, "--prefill-tp-size", 2, "--decode-tp-size", 2)
    with serve(tiny_model, *flags) as served:
        victim = served.pid_of(engine, process)
        streams_through(served, expected, lambda: os.kill(victim, number))
        # whatever the fault was, the pair serves afterwards, and nothing is left of the old epoch
        streams_through(served, expected[:1], lambda: None)
        served.assert_no_residue()
        incidents = [json.loads(p.read_text()) for p in served.run_dir.glob(f"{engine}/incidents/*/manifest.json")]
        assert len(incidents) == 1
        assert not Path(f"/proc/{victim}").exists()
