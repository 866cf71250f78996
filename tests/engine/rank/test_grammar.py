"""Grammars: only what they admit is sampled, a resumed answer goes on, and a broken one harms nobody else."""

import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.engine.rank.collectives import Solo
from closeranks.engine.rank.grammar import CompilerThread, Grammars, NotCompiled
from closeranks.engine.rank.runner import InvalidStep, Runner
from closeranks.protocol import Begin, Compile, Compiled, Row, Sampling, Step

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
    built.grammars = Grammars(converted.path / "tokenizer.json", 131)
    return built


def answer(runner: Runner, grammar: str, new: int, output: list[int] | None = None, slot: int = 0) -> list[int]:
    """Sampled tokens up to the stop token or `new`."""
    if runner.grammars is not None:
        assert runner.grammars.compile(grammar)[0] == ""
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


STRING = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 9}, "max_whitespace_cnt": 24}
THOUGHT = [{"type": "any_text", "excludes": ["y"]}, {"type": "const_string", "value": "y"}]


@pytest.mark.parametrize(
    ("format", "before"),
    [
        (STRING, '"a'),
        ({"type": "sequence", "elements": [*THOUGHT, STRING]}, 'xĉāy"a'),
        ({"type": "or", "elements": [STRING, {"type": "const_string", "value": "z"}]}, '"a'),
        ({"type": "repeat", "min": 1, "max": 3, "content": STRING}, '"a""a'),
        ({"type": "dispatch", "rules": [["z", STRING]], "loop": True}, 'ĉz"a'),
    ],
)
def test_no_control_characters_in_json_wherever_it_stands(tmp_path: Path, format: Any, before: str) -> None:
    letters = [*LETTERS, "Ġ", "ĉ", "Ċ", "ā"]  # as byte-level tokenizers write space, tab, newline and \x01
    words = {letter: i for i, letter in enumerate(letters)}
    model = {"type": "BPE", "vocab": words, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "decoder": BYTES}))
    grammars = Grammars(tmp_path / "tokenizer.json", len(letters))
    made = json.dumps({"type": "structural_tag", "format": format}, separators=(",", ":"))
    assert grammars.compile(f"structural_tag:{made}")[0] == ""
    output = [words[letter] for letter in before]
    state = grammars.begin(Sampling(grammar=f"structural_tag:{made}", stop_ids=(0,)), output)
    allowed = state.allowed(torch.device("cpu"))
    assert allowed is not None
    found = {letter for letter, ok in zip(letters, allowed.tolist(), strict=True) if ok}
    assert {"Ġ", "a", '"'} <= found
    assert not {"ĉ", "ā", "Ċ"} & found


@pytest.mark.parametrize(
    "grammar",
    [
        "ebnf:root ::= (",
        "json_schema:{",
        "structural_tag:{}",
        'structural_tag:{"format": "maxLength"}',
        'structural_tag:{"format": {"type": "sequence", "elements": 7, "maxLength": 1}}',
        'structural_tag:["maxLength"]',
        "structural_tag:" + "[" * 100_000 + '"maxLength"',
        "poetry:x",
        "x",
    ],
)
def test_a_grammar_that_is_none_is_said_to_be_wrong(runner: Runner, grammar: str) -> None:
    assert runner.grammars is not None
    error, _ = runner.grammars.compile(grammar)
    assert error
    assert "/" not in error.partition("known are")[0], "no place in the compiler's own source"


def test_a_row_that_begins_with_a_grammar_that_is_not_there_is_a_fault(runner: Runner) -> None:
    assert runner.grammars is not None
    grammar = 'ebnf:root ::= "abc"'
    answer(runner, grammar, 3)
    runner.grammars.forget(grammar)
    begin = Begin(Sampling(grammar=grammar, stop_ids=(STOP,)), [7, 8], 2, [0])
    with pytest.raises(NotCompiled):
        runner.run(Step(1, 1, [Row(0, 0, 2, [], True, begin)]))


def wrong(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"ok": {"type": "string"}, "x": {"type": "array", "items": schema}}}


FORWARD = {"type": "string", "pattern": "[z-a]"}


def tagged(*elements: Any) -> str:
    whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return f"structural_tag:{json.dumps(whole)}"


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (f"json_schema:{json.dumps(wrong(FORWARD))}", "x.items"),
        (f"json_schema:{json.dumps(wrong({'anyOf': [{'type': 'null'}, {'type': 'foo'}]}))}", "x.items.anyOf[1]"),
        (f"json_schema:{json.dumps({'$ref': '#/$defs/d', '$defs': {'d': wrong(FORWARD)}})}", "$defs.d.x.items"),
        (
            tagged(
                {"type": "const_string", "value": '<invoke name="book">'},
                {"type": "const_string", "value": '<parameter name="'},
                {"type": "const_string", "value": "day"},
                {"type": "const_string", "value": '" string="false">'},
                {"type": "json_schema", "json_schema": wrong(FORWARD)},
            ),
            "tool 'book'.day.x.items",
        ),
        (
            tagged(
                {"type": "const_string", "value": '\n{"name": "book", "arguments": '},
                {"type": "json_schema", "json_schema": FORWARD},
            ),
            "tool 'book'",
        ),
    ],
)
def test_the_error_names_the_place_in_the_schema(runner: Runner, grammar: str, place: str) -> None:
    assert runner.grammars is not None
    error, _ = runner.grammars.compile(grammar)
    assert error.startswith(f"{place}: cannot be enforced: "), error
    assert "lower bound" in error or "Unsupported type" in error


def test_orders_are_answered_beside_the_steps(runner: Runner) -> None:
    said: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    faults: list[BaseException] = []
    thread = CompilerThread(runner.grammars, 3, said.put, faults.append)
    thread.take(Compile(3, 1, 'ebnf:root ::= "a"'))
    thread.take(Compile(3, 2, "ebnf:root ::= ("))
    first, second = said.get(timeout=60), said.get(timeout=60)
    assert (first.epoch, first.number, first.error) == (3, 1, "")
    assert first.size > 0
    assert second.number == 2
    assert second.error
    thread.take(Compile(3, 0, "", [1, 2, 9]))
    assert runner.grammars is not None
    with pytest.raises(NotCompiled):
        runner.grammars.begin(Sampling(grammar='ebnf:root ::= "a"', stop_ids=(STOP,)), [])
    CompilerThread(None, 3, said.put, faults.append).take(Compile(3, 4, "ebnf:x"))
    assert "tokenizer" in said.get(timeout=60).error
    assert not faults


def test_what_is_dropped_before_its_turn_is_not_compiled(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor kept where its turn had come: the leader orders no second drop."""
    grammars = runner.grammars
    assert grammars is not None
    said: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    faults: list[BaseException] = []
    begun, go_on = threading.Event(), threading.Event()
    compiled, compile_one = [], grammars.compile

    def held(text: str) -> tuple[str, int]:
        compiled.append(text)
        begun.set()
        assert go_on.wait(60)
        return compile_one(text)

    monkeypatch.setattr(grammars, "compile", held)
    thread = CompilerThread(grammars, 3, said.put, faults.append)
    for number, letter in enumerate("abab", 1):
        thread.take(Compile(3, number, f'ebnf:root ::= "{letter}"'))
    assert begun.wait(60)
    thread.take(Compile(3, 0, "", [1, 2, 3]))
    go_on.set()
    assert [said.get(timeout=60).number for _ in range(2)] == [1, 4]
    assert compiled == ['ebnf:root ::= "a"', 'ebnf:root ::= "b"']
    assert not faults
    with pytest.raises(NotCompiled):
        grammars.begin(Sampling(grammar='ebnf:root ::= "a"', stop_ids=(STOP,)), [])
    grammars.begin(Sampling(grammar='ebnf:root ::= "b"', stop_ids=(STOP,)), [])


def test_output_that_the_grammar_does_not_admit_ends_the_answer(runner: Runner) -> None:
    assert answer(runner, 'ebnf:root ::= "ab"', 20, [LETTERS.index("q")]) == [STOP]


def test_without_a_tokenizer_a_grammar_is_a_fault(tmp_path: Path) -> None:
    path = tiny.folder(tmp_path / "hf")
    bare = tiny.runner(tiny.model(tiny.convert(path, tmp_path / "cache")), Solo())
    with pytest.raises(InvalidStep, match="grammar"):
        answer(bare, 'ebnf:root ::= "a"', 3)


def test_a_tokenizer_that_cannot_be_used_is_said_and_nothing_is_raised(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[]")
    grammars = Grammars(tmp_path / "tokenizer.json", 131)
    said = grammars.load()
    assert "tokenizer" in said
    assert grammars.compile("json_schema:{}") == (said, 0)
