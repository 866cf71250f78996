"""The plug-ins inside the real parser modules of vLLM and SGLang.

Skipped unless CLOSERANKS_VLLM_VENV or CLOSERANKS_SGLANG_VENV names an environment with the engine
(`bench/codec_peers/setup.sh DIR` makes both).
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CASES = [json.loads(line) for line in (ROOT / "tests" / "corpus" / "dsml.jsonl").read_text().splitlines()]

pytestmark = pytest.mark.slow


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_of(engine: str) -> str:
    variable = f"CLOSERANKS_{engine.upper()}_VENV"
    venv = os.environ.get(variable)
    if not venv:
        pytest.skip(f"{variable} names no environment with {engine} (bench/codec_peers/setup.sh makes one)")
    return str(Path(venv) / "bin" / "python")


def run(engine: str, program: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [python_of(engine), "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_plugin_gives_what_the_decoder_gives(engine: str) -> None:
    """Every case of the corpus, in one piece and streamed in pieces of several sizes."""
    python = python_of(engine)
    compare, peer = _load("bench/codec_peers/compare.py"), _load("bench/codec_peers/peer.py")
    decode = peer.closeranks()
    process = compare.Peer(f"{engine}+closeranks", python)
    different = []
    try:
        for case in CASES:
            text = case["model_output"]
            thinking = bool(case.get("thinking"))
            job = {"tools": compare.tools_of(case), "thinking": thinking, "dialect": "v4", "finish_reason": "stop"}
            want = decode({**job, "pieces": [text]})
            for size in (len(text) or 1, 1, 3, 16):
                pieces = [text[at : at + size] for at in range(0, len(text), size)] or [""]
                got = process.run({**job, "pieces": pieces})
                if without_uncommitted(got) != want:
                    different.append((case["id"], size, got, want))
    finally:
        process.close()
    assert different == []


def without_uncommitted(answer: dict[str, Any]) -> dict[str, Any]:
    """A stream may hold a call that was begun and not committed; its arguments do not parse."""

    def parses(text: str) -> bool:
        try:
            json.loads(text)
        except ValueError:
            return False
        return True

    return {**answer, "calls": [call for call in answer.get("calls", ()) if parses(call[1])]}


def test_vllm_loads_the_plugin_by_its_own_flags() -> None:
    program = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.tool_parsers import ToolParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.parser.parser_manager import ParserManager
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
ToolParserManager.import_tool_parser(args.tool_parser_plugin)
ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
kind = ParserManager.get_parser(args.tool_call_parser, args.reasoning_parser, args.enable_auto_tool_choice)
print(kind.tool_parser_cls.__name__, kind.reasoning_parser_cls.__name__)
"""
    plugin = "closeranks.gateway.plugins.vllm_parser"
    flags = ["--tool-parser-plugin", plugin, "--reasoning-parser-plugin", plugin]
    flags += ["--tool-call-parser", "closeranks_v4", "--reasoning-parser", "closeranks_v4", "--enable-auto-tool-choice"]
    assert run("vllm", program, *flags) == "CloseranksV4ToolParser CloseranksV4ReasoningParser"
    flags[1] = flags[3] = str(ROOT / "src/closeranks/gateway/plugins/vllm_parser.py")
    assert run("vllm", program, *flags) == "CloseranksV4ToolParser CloseranksV4ReasoningParser"


def test_sglang_takes_the_names_as_its_own() -> None:
    program = """
import sys
from closeranks.gateway.plugins.sglang_detector import install
names = install()
from sglang.srt.server_args import _reasoning_parser_choices, _tool_call_parser_choices
print(set(names) <= set(_tool_call_parser_choices()) and set(names) <= set(_reasoning_parser_choices()))
"""
    assert run("sglang", program) == "True"
