"""On well-formed turns the decoder equals DeepSeek's own, where `deepseek-recipe` is installed."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from damage import turn
from properties import run

from closeranks.codec import assemble

peer = pytest.importorskip("deepseek_recipe")


def recipe(text: str, thinking: bool, model: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls as deepseek-recipe reads them."""
    conversation = peer.ConversationRequest(peer.Conversation(), model)
    stage = peer.ThinkingInitialStage.ReasoningStart if thinking else None
    options = peer.ParsingOptions(
        parse_tool_calls=True, starts_in_tool_calls=False, thinking_initial_stage=stage, stop_sequences=[]
    )
    processor = peer.StreamProcessor(peer.ChatCompletionRequest.chunk_generator(conversation, "id", "m"), options, None)
    chunks = processor.push(peer.InferenceChunk.text(text, 1))
    chunks += processor.push(peer.InferenceChunk.finish(peer.InferenceFinishReason.Stop))
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in json.loads(chunk.to_json()).get("choices", []):
            delta = choice.get("delta", {})
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                made = calls.setdefault(call["index"], ["", ""])
                made[0] += call["function"].get("name") or ""
                made[1] += call["function"].get("arguments") or ""
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("dialect", ["v4", "v41"])
def test_well_formed_turns_agree(dialect: str) -> None:
    """Some hundred turns; the peer drops every newline before a block, of which two are framing. Names that hold a
    quote or a space are left out: the peer writes them into the JSON unescaped or cut."""
    model = peer.ModelVersion.DeepseekV4Pro if dialect == "v4" else peer.ModelVersion.DeepseekV41Flash
    for seed in range(600):
        made = turn(random.Random(seed), dialect)
        if 'q"uote' in made.text or "with space" in made.text:
            continue
        got = assemble(run([made.text], dialect=dialect, thinking=made.thinking))
        reasoning, content, calls = recipe(made.text, made.thinking, model)
        assert (got.reasoning, got.content.rstrip("\n")) == (reasoning, content.rstrip("\n"))
        mine = [(call.name, json.loads(call.arguments)) for call in got.tool_calls]
        assert mine == [(name, json.loads(arguments)) for name, arguments in calls], made.text
