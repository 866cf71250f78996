#!/usr/bin/env python3
"""Released parsers side by side on the public corpus: exact, leaks, chunk-variant, bad JSON.

    python bench/codec_peers/compare.py [--corpus FILE] [--peers closeranks,recipe,vllm,...] [--markdown FILE]

Each peer runs in a Python of its own: `recipe` and `closeranks` in this one, `vllm` and `sglang` in those of the
environments that CLOSERANKS_VLLM_VENV and CLOSERANKS_SGLANG_VENV name (`make bench-codec` sets them up; peers without
one are left out and said to be). `vllm+closeranks` and `sglang+closeranks` are the plug-ins inside those engines.

A case is run in one piece (the parser's one-shot path) and as a stream under many chunkings. It is exact if content,
reasoning and calls are as expected or as a listed alternative under all of them; a leak if a marker shows in content,
reasoning or a name more often than any expectation has it; chunk-variant if two chunkings of the stream differ (the
one-shot path may differ from the stream: column `one-shot differs`); bad JSON if a call's arguments are no JSON object
although the stream was not cut. The last line printed is JSON.
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


def streams(case: dict[str, Any], most_splits: int) -> list[list[str]]:
    """Chunkings of a case's output, each of at least two pieces (one would be the one-shot path)."""
    text = case["model_output"]
    rng = random.Random(7)
    ways = [score.cut(text, range(len(text)))]
    if case.get("chunking"):
        ways.append(score.cut(text, case["chunking"]))
    ways += [score.cut(text, range(0, len(text), size)) for size in (3, 7, 16)]
    ways += [score.cut(text, rng.sample(range(len(text)), min(len(text), 8))) for _ in range(4)]
    step = max(1, -(-len(text) // most_splits))
    ways += [score.cut(text, [place]) for place in range(1, len(text), step)]
    return [pieces for pieces in ways if len(pieces) > 1]


def judge(case: dict[str, Any], peer: Peer, splits: int) -> dict[str, bool]:
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
    answers = [peer.run({**job, "pieces": pieces}) for pieces in streams(case, splits)]
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
            verdicts = {case["id"]: judge(case, peer, options.splits) for case in cases}
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
