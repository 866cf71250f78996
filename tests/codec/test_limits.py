"""Damaged turns with runs of one thing, about as long as each limit of the decoder: the properties hold there too."""

import random
from typing import Any

import pytest

from closeranks.codec import Discarded, assemble, merge
from closeranks.codec.envelope import HEAD_LIMIT
from tests.codec.damage import damaged
from tests.codec.properties import check_json, check_order, check_text, run, settings_of

LIMITS = (16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
RUNS = [" ", "\n", "\t", "a", "<", "7", '"', "`", "｜", "|", "{", "[", "\\", "-", "=", "/", "é", "_", "'"]
RUNS += ["x y ", "<th", "</", "<｜", "</th", "</｜D", "ab\n", "DSML", "｜DSML｜"]


def long_turn(rng: random.Random) -> str:
    """A damaged turn, in which something goes on for about as long as some limit."""
    text = damaged(rng)
    for _ in range(rng.randint(1, 2)):
        unit = rng.choice(RUNS)
        count = max(1, (rng.choice(LIMITS) + rng.randint(-4, 4)) // len(unit))
        at = rng.randint(0, len(text))
        text = text[:at] + unit * count + text[at:]
    return text[:9000]


def check_long(seed: int) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = settings_of(rng)
    text = long_turn(rng)
    whole = run([text], **settings)
    check_order(whole)
    check_json(whole)
    quoted = settings["policy"].quoted == "keep"
    turn = assemble(whole)
    for output in (turn.content, turn.reasoning):
        check_text(output, settings["dialect"], quoted)
    place = rng.randint(0, len(text))
    for pieces in ([text[:place], text[place:]], [text[i : i + 7] for i in range(0, len(text), 7)], list(text)):
        assert merge(run(pieces, **settings)) == merge(whole), (seed, len(pieces))


@pytest.mark.parametrize("seed", range(24))
def test_long_runs(seed: int) -> None:
    check_long(seed)


@pytest.mark.parametrize("tail", ["}", ', "x": ', "{", "x"])
@pytest.mark.parametrize("by", [-2, -1, 0, 1, 40])
@pytest.mark.parametrize("end", ["", "\n</tool_call>"])
def test_what_follows_the_arguments_of_an_envelope_is_kept_up_to_a_limit_whatever_the_cuts(
    tail: str, by: int, end: str
) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}' + tail + "y" * (HEAD_LIMIT + by - len(tail)) + end
    whole = merge(run([text], dialect="hermes"))
    for pieces in (list(text), [text[i : i + 7] for i in range(0, len(text), 7)], [text[:900], text[900:]]):
        assert merge(run(pieces, dialect="hermes")) == whole


CHAINS = ["</", "<", "<｜", "</th", "<\n\n"]
TAILS = ["<think>x", "</think>[<", "</｜DSML｜invoke>b", "<｜User｜>"]


def check_chain(unit: str, length: int, before: str, tail: str, thinking: bool) -> None:
    """Beginnings of markers in a row, about as many as are held, up to a marker that may be quoted."""
    chain = (unit * length)[:length]
    text = before + chain + tail
    whole = run([text], dialect="v4", thinking=thinking, tools=["f"])
    quoted = before == "`" and "\n" not in chain
    if quoted and tail[1:6] == "think":
        assert not any(isinstance(event, Discarded) for event in whole), text
    for pieces in (list(text), [text[: -len(tail)], tail], [text[: len(before)], text[len(before) :]]):
        assert merge(run(pieces, dialect="v4", thinking=thinking, tools=["f"])) == merge(whole), pieces


@pytest.mark.parametrize("unit", CHAINS)
def test_chains_about_as_long_as_is_held(unit: str) -> None:
    for length in (16, *range(30, 38), 64):
        for before in ("`", "a"):
            check_chain(unit, length, before, TAILS[length % len(TAILS)], thinking=False)
            check_chain(unit, length, before, "<think>x", thinking=length % 2 == 0)


@pytest.mark.parametrize("odd", ["", "<"])
@pytest.mark.parametrize("count", [14, 15, 16, 17, 19])
def test_a_chain_that_is_completed_from_behind_stays_no_marker(count: int, odd: str) -> None:
    """Each `think>` takes the last beginning that is left, down to those that were sent for the length of the chain."""
    for completions in (count, count + 1):
        start, end = "a" + "</" * count + odd, "</｜DSML｜invoke>" + "think>" * completions
        whole = run([start + end], dialect="v4", tools=["f"])
        check_text(assemble(whole).content, "v4", quoted=True)
        for pieces in ([start, end], list(start + end)):
            assert merge(run(pieces, dialect="v4", tools=["f"])) == merge(whole), pieces


@pytest.mark.slow
def test_all_chains() -> None:
    for unit in (*CHAINS, "｜", "</｜D", "<th\n"):
        for length in (24, *range(30, 40), *range(62, 67)):
            for before in ("", "`", "a", "```\n"):
                for tail in TAILS:
                    for thinking in (False, True):
                        check_chain(unit, length, before, tail, thinking)


@pytest.mark.slow
def test_many_long_runs() -> None:
    for seed in range(1000, 1400):
        check_long(seed)
