"""The `openai` client through the guard, before an upstream that leaks: streaming and not, thinking and not."""

import asyncio
import json
import random
from typing import Any

import openai
import pytest

from tests.gateway.guard.doubles import DONE, Request, Write, chunked, event, guarded, tools

BLOCK = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
WRAPPED = BLOCK.replace("tool_calls", "function_calls")
BARE = BLOCK.split("\n", 1)[1].rsplit("\n", 1)[0]
SPELLED = BLOCK.replace("｜", "|")


async def leaking(request: Request, write: Write) -> None:
    """Answers with what the last message says, as an engine without a parser would: cut at random."""
    asked = json.loads(request.body)
    text = asked["messages"][-1]["content"]
    thought, closer, content = text.rpartition("</think>")
    if not asked.get("stream"):
        message = {"role": "assistant", "content": content, **({"reasoning_content": thought} if closer else {})}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        top = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        body = json.dumps(top).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await write(head.encode() + body)
        return
    rng = random.Random(text)
    stream = event(role="assistant", content="")
    for field, part in (("reasoning_content", thought), ("content", content)):
        while part:
            size = rng.randint(1, 9)
            stream += event(**{field: part[:size]})
            part = part[size:]
    stream += event(finish="stop") + DONE
    pieces = []
    while stream:
        size = rng.randint(1, 400)
        pieces.append(stream[:size])
        stream = stream[size:]
    for piece in chunked(*pieces):
        await write(piece)


async def ask(port: int, text: str, stream: bool, **options: Any) -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)
    async with client:
        messages: Any = [{"role": "user", "content": text}]
        if not stream:
            whole = await client.chat.completions.create(model="m", messages=messages, **options)
            choice = whole.choices[0]
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            return {"content": choice.message.content or "", "calls": calls, "finish": choice.finish_reason}
        content, found, finish = "", {}, None
        async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True, **options):
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                entry = found.setdefault(call.index, ["", ""])
                entry[0] += call.function.name or ""
                entry[1] += call.function.arguments or ""
            finish = choice.finish_reason or finish
        return {"content": content, "calls": [tuple(c) for _, c in sorted(found.items())], "finish": finish}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("thought", ["", "let me think</think>"])
@pytest.mark.parametrize("block", [BLOCK, WRAPPED, BARE, SPELLED], ids=["block", "v32", "bare", "spelled"])
def test_a_leaked_call_arrives_as_a_tool_call(stream: bool, thought: str, block: str) -> None:
    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        async with guarded(leaking) as (_, server):
            text = f"{thought}I will look.\n\n{block}"
            offered: Any = tools("get_weather")
            return await ask(server.port, text, stream, tools=offered), await ask(server.port, text, stream)

    with_tools, without = asyncio.run(asyncio.wait_for(main(), 60))
    assert with_tools["calls"] == [("get_weather", '{"city": "Oslo"}')]
    assert with_tools["finish"] == "tool_calls"
    assert with_tools["content"].strip() == "I will look."
    assert without == {"content": without["content"], "calls": [], "finish": "stop"}
    assert without["content"].strip() == "I will look."


def test_an_upstream_that_dies_raises_in_the_client() -> None:
    async def dying(request: Request, write: Write) -> None:
        for piece in chunked(event(content="a"), end=False):
            await write(piece)

    async def main() -> None:
        async with guarded(dying) as (_, server):
            await ask(server.port, "x", stream=True)

    with pytest.raises(openai.APIError, match="broke off"):
        asyncio.run(asyncio.wait_for(main(), 60))
