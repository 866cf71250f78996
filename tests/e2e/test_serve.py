"""The whole service, started as a person starts it, on a tiny random model: clients, aborts, ends."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.e2e import exactness
from tests.e2e.reference import Reference
from tests.e2e.service import Served, serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Served]:
    with serve(tiny_model, "--num-pages", 400, "--disaggregation-transfer-backend", "shm") as served:
        yield served


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


def test_openai_client_streaming_and_not_say_the_same(pair: Served) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    whole = client(pair).chat.completions.create(model="default", messages=messages, max_tokens=12, temperature=0)
    stream = client(pair).chat.completions.create(
        model="default", messages=messages, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_seeded_sampling_repeats(pair: Served) -> None:
    body = {
        "model": "default",
        "prompt": [7, 8, 9],
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": True,
    }
    first, again = (pair.post("/v1/completions", body)["choices"][0]["text"] for _ in range(2))
    other = pair.post("/v1/completions", {**body, "seed": 4})["choices"][0]["text"]
    assert first == again
    assert first != other


def test_a_hundred_aborts_leave_nothing_and_spare_the_others(pair: Served, tiny_model: Path) -> None:
    reference = Reference(tiny_model)
    draw = random.Random(1)
    survivors = [
        reference.continue_([draw.randrange(5, 500) for _ in range(draw.randrange(1, 200))], 16) for _ in range(20)
    ]

    async def cut(session: aiohttp.ClientSession, i: int) -> None:
        body = {"model": "default", "prompt": [5 + i % 400] * draw.randrange(1, 300), "max_tokens": 200, "stream": True,
                "ignore_eos": True}  # fmt: skip
        try:
            async with (
                asyncio.timeout(draw.random() * 1.5),
                session.post(f"{pair.url}/v1/completions", json=body) as answer,
            ):
                async for _ in answer.content:
                    pass
        except TimeoutError:
            pass

    async def main() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            cuts = asyncio.gather(*(cut(session, i) for i in range(100)))
            answers = await asyncio.gather(
                *(exactness.complete(session, pair.url, e.prompt, len(e.tokens)) for e in survivors)
            )
            await cuts
            for e, got in zip(survivors, answers, strict=True):
                assert got == e.tokens

    asyncio.run(main())
    pair.assert_no_residue()


def test_ready_health_metrics(pair: Served) -> None:
    assert pair.get("/health")[0] == 200
    assert b"closeranks_" in pair.get("/metrics")[1]
    assert json.loads(pair.get("/v1/models")[1])["data"]


def test_sigterm_ends_all(tiny_model: Path) -> None:
    with serve(tiny_model, "--num-pages", 100, "--disaggregation-mode", "null") as served:
        assert served.post("/v1/completions", {"model": "default", "prompt": "hi", "max_tokens": 3})["choices"]
        assert served.stop() == 0
