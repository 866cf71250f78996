"""Parser names of SGLang and vLLM."""

import pytest

from closeranks.codec import DIALECTS
from closeranks.codec.parsers import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ParserChoice,
    UnknownParser,
    choose,
    dialect_for,
)


def test_every_name_leads_to_a_dialect() -> None:
    assert set(TOOL_CALL_PARSERS.values()) | set(REASONING_PARSERS.values()) == set(DIALECTS)


def test_the_usual_pairs() -> None:
    assert choose("deepseekv4", "deepseek-v4") == ParserChoice("v4", tools=True, reasoning=True)
    assert choose("deepseek_v32", "deepseek_r1") == ParserChoice("v32", True, True, always_thinking=True)
    assert choose("qwen25") == ParserChoice("hermes", True, False)
    assert choose(reasoning_parser="qwen3") == ParserChoice("hermes", False, True)
    assert choose() == ParserChoice("v4", False, False)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownParser, match=r"--tool-call-parser 'llama3'.*deepseekv4.*hermes"):
        choose("llama3")
    with pytest.raises(UnknownParser, match=r"--reasoning-parser 'glm45'.*qwen3"):
        choose(None, "glm45")
    with pytest.raises(UnknownParser, match="deepseek_v41"):
        dialect_for("x")


def test_families_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different model families"):
        choose("hermes", "deepseek-v4")


def test_other_spellings_of_dialects() -> None:
    assert [dialect_for(name) for name in ("DeepSeek-V4", "v3.2", "dsml-v4.1", "V41")] == ["v4", "v32", "v41", "v41"]
