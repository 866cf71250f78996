"""Grammars: only what they admit is sampled, a resumed answer goes on, and a broken one harms nobody else."""

import json
from pathlib import Path

import pytest
import torch

from closeranks.engine.rank.collectives import Solo
from closeranks.engine.rank.grammar import Grammars
from closeranks.engine.rank.runner import InvalidStep, Runner
from closeranks.protocol import Begin, Row, Sampling, Step

from . import tiny

pytest.importorskip("xgrammar")
torch.set_num_threads(1)
LETTERS = [*'{}[]":,0123456789abcdefghijklmnopqrstuvwxyz']
STOP = 130
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["xy", "z"]}}, "required": ["a"]})


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tiny.folder(tmp_path_factory.mktemp("model") / "hf")
    words = {letter: i for i, letter in enumerate(LETTERS)}
    words |= {f"<{i}>": i for i in range(len(LETTERS), 131)}
    model = {"type": "BPE", "vocab": words, "merges": []}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": BYTES}))
    converted = tiny.convert(path, path.parent / "cache")
    built = tiny.runner(tiny.model(converted), Solo())
    built.grammars = Grammars(converted.path / "tokenizer.json", 131, built.group.tick)
    return built


def answer(runner: Runner, grammar: str, new: int, output: list[int] | None = None, slot: int = 0) -> list[int]:
    """Sampled tokens up to the stop token or `new`."""
    sampling = Sampling(temperature=1.0, seed=5, grammar=grammar, stop_ids=(STOP,))
    tokens = [7, 8, 9, *(output or [])]
    pages = list(range(32))
    rows = [Row(slot, 0, len(tokens), [], True, Begin(sampling, tokens, 3, pages))]
    out: list[int] = []
    while len(out) < new and STOP not in out:
        out += runner.run(Step(1, 1, rows)).tokens
        rows = [Row(slot, len(tokens) + len(out) - 1, 1, sample=True)]
    return out


def text(tokens: list[int]) -> str:
    return "".join(LETTERS[t] for t in tokens if t != STOP)


def test_the_answer_is_what_the_grammar_admits_and_can_be_resumed(runner: Runner) -> None:
    grammar = 'ebnf:root ::= "ab" [0-9] [0-9] [0-9] "z"'
    whole = answer(runner, grammar, 20)
    assert text(whole)[:2] == "ab"
    assert text(whole)[2:5].isdigit()
    assert text(whole)[5:] == "z"
    assert whole[-1] == STOP
    assert answer(runner, grammar, 20, whole[:3]) == whole[3:]


def test_json_follows_its_schema(runner: Runner) -> None:
    whole = answer(runner, f"json_schema:{SCHEMA}", 60)
    assert json.loads(text(whole)) in ({"a": "xy"}, {"a": "z"})


@pytest.mark.parametrize("grammar", ["ebnf:root ::= (", "json_schema:{", "structural_tag:{}", "poetry:x", "x"])
def test_a_grammar_that_is_none_ends_its_answer_and_nothing_else(runner: Runner, grammar: str) -> None:
    assert answer(runner, grammar, 20) == [STOP]


def test_output_that_the_grammar_does_not_admit_ends_the_answer(runner: Runner) -> None:
    assert answer(runner, 'ebnf:root ::= "ab"', 20, [LETTERS.index("q")]) == [STOP]


def test_without_a_tokenizer_a_grammar_is_a_fault(tmp_path: Path) -> None:
    path = tiny.folder(tmp_path / "hf")
    bare = tiny.runner(tiny.model(tiny.convert(path, tmp_path / "cache")), Solo())
    with pytest.raises(InvalidStep, match="grammar"):
        answer(bare, 'ebnf:root ::= "a"', 3)
