"""Damaged turns with runs of one thing, about as long as each limit of the decoder: the properties hold there too."""

import random
from typing import Any

import pytest

from closeranks.codec import assemble, merge
from tests.codec.damage import damaged
from tests.codec.properties import check_json, check_order, check_text, run, settings_of

LIMITS = (16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
RUNS = [" ", "\n", "\t", "a", "<", "7", '"', "`", "｜", "|", "{", "[", "\\", "-", "=", "/", "é", "_", "'"]
RUNS += ["x y ", "<th", "ab\n", "DSML", "｜DSML｜"]


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


@pytest.mark.slow
def test_many_long_runs() -> None:
    for seed in range(1000, 1400):
        check_long(seed)
