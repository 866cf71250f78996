"""Schemas at random, through the guide, against the engine's own grammars: what is accepted compiles and admits exactly
what is valid, and nothing that a model could write under it ends anywhere else than in a valid value."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.engine.rank.grammar import Grammars, GrammarState, strict
from closeranks.gateway import openai
from closeranks.gateway.errors import Invalid
from closeranks.gateway.guide import Guide, guide
from closeranks.gateway.schemas import Cleaner, SchemaError
from closeranks.protocol import Sampling
from tests.gateway.schema_cases import documents, near, valid, values

xgrammar = pytest.importorskip("xgrammar")

WORDS = ["</s>", *map(chr, range(1, 256)), "｜", "😀"]
LETTERS = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(WORDS, stop_token_ids=[0]), max_threads=1)
STOP = 0
CLOSING = frozenset((b'"', b"}", b"]", b",", b":"))


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def answer_guide(schema: Any) -> Guide | None:
    """The guide of an answer held to a schema; None: refused."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    try:
        return guide(openai.parse(json.dumps(body).encode(), openai.ChatRequest), [], "", False)
    except Invalid as error:
        refused = error
    assert refused.param == "response_format.json_schema.schema"
    return None


def compiled(made: Guide, compiler: Any) -> Any:
    return compiler.compile_structural_tag(strict(made.grammar.partition(":")[2]))


def admits(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[STOP])
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(STOP))


def spellings(value: Any) -> list[str]:
    """As JSON is usually written: with spaces and without (values of an `enum` have none inside)."""
    return [json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":"))]


def check_answer(data: Any, compiler: Any) -> None:
    document = data.draw(documents())
    made = answer_guide(document)
    if made is None:
        with pytest.raises(SchemaError):
            Cleaner().clean(document, strict=True)
        Cleaner().clean(document, strict=False)
        return
    grammar = compiled(made, compiler)
    defs = document["$defs"]
    for _ in range(3):
        value = data.draw(values(document, defs))
        if data.draw(st.booleans()):
            value = data.draw(near(value))
        admitted = [admits(grammar, text) for text in spellings(value)]
        if valid(document, value, defs, narrow=True):
            assert any(admitted), (document, value)
        if not valid(document, value, defs, narrow=False):
            assert not any(admitted), (document, value)


@pytest.mark.parametrize(
    ("text", "taken"),
    [(" ", True), ("\u3000", True), ("\ufeff", True), ("\x85", False), ("\x1c", False), ("x", False)],
)
def test_white_space_of_a_pattern_is_that_of_ecma_262(text: str, taken: bool) -> None:
    """JSON Schema refers to it. Python's takes U+0085 and four separators more, and not U+FEFF."""
    document = {"type": "string", "pattern": r"\s"}
    made = answer_guide(document)
    assert made is not None
    assert admits(compiled(made, LETTERS), f'"{text}"') is taken
    assert valid(document, text, {}, narrow=False) or not taken


@few(60)
@given(st.data())
def test_an_answer_is_exactly_what_is_valid(data: Any) -> None:
    check_answer(data, LETTERS)


@few(60)
@given(documents(), st.sampled_from(["v32", "v4", "v41", "hermes"]), st.booleans(), st.booleans())
def test_tools_of_any_schema_compile_unless_strict_refuses_them(
    document: Any, dialect: str, parses: bool, strict: bool
) -> None:
    function = {"name": "f", "parameters": {**document, "type": "object"}, "strict": strict}
    refused: list[str] = []
    for choice in ("required", "auto"):
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
        request = openai.parse(json.dumps({**body, "tool_choice": choice}).encode(), openai.ChatRequest)
        try:
            made = guide(request, request.tools or [], dialect, parses)
        except Invalid as error:
            refused.append(error.param or "")
            continue
        if made is not None:
            compiled(made, LETTERS)
    assert all(param.startswith("tools") for param in refused)


def walk(state: GrammarState, words: list[bytes], rng: random.Random) -> str | None:
    """What a model that picks at random writes; None: it has not come to an end. It never is without a choice."""
    text = b""
    for _ in range(80):
        allowed = state.allowed(torch.device("cpu"))
        assert allowed is not None, f"a dead end behind {text!r}"
        tokens = allowed.nonzero().view(-1).tolist()
        closing = [token for token in tokens if token == STOP or words[token] in CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.6 else tokens)
        if token == STOP:
            return text.decode()
        state.add(token)
        text += words[token]
    return None


def check_walk(document: Any, begin: Callable[[Guide], GrammarState], words: list[bytes], rng: random.Random) -> None:
    made = answer_guide(document)
    for _ in range(3 if made else 0):
        assert made is not None
        text = walk(begin(made), words, rng)
        if text is not None:
            assert valid(document, json.loads(text), document["$defs"], narrow=False), (document, text)


@few(40)
@given(documents(), st.randoms(use_true_random=False))
def test_whatever_is_written_is_valid(document: Any, rng: random.Random) -> None:
    def begin(made: Guide) -> GrammarState:
        matcher = xgrammar.GrammarMatcher(compiled(made, LETTERS), override_stop_tokens=[STOP])
        return GrammarState(matcher, (STOP,), len(WORDS))

    check_walk(document, begin, [word.encode() for word in WORDS], rng)


@pytest.mark.slow
def test_the_same_with_a_real_tokenizer() -> None:
    from tokenizers import Tokenizer

    from closeranks.engine.rank.convert import prepare

    path = prepare("").path / "tokenizer.json"
    size = Tokenizer.from_file(str(path)).get_vocab_size()
    grammars = Grammars(path, size)
    info = grammars._tokenizer_info()
    compiler, words = xgrammar.GrammarCompiler(info, max_threads=1), info.decoded_vocab

    def begin(made: Guide) -> GrammarState:
        error, _ = grammars.compile(made.grammar)
        assert not error
        return grammars.begin(Sampling(grammar=made.grammar, stop_ids=(STOP,)), [])

    @few(150)
    @given(st.data())
    def exact(data: Any) -> None:
        check_answer(data, compiler)

    @few(150)
    @given(documents(), st.randoms(use_true_random=False))
    def walks(document: Any, rng: random.Random) -> None:
        check_walk(document, begin, words, rng)

    walks()
    exact()
