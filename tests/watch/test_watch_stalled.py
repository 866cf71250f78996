"""A loop that turns while nothing advances, look by look; and long work that only resembles it."""

from typing import Any

import pytest

from tests.watch.looks import Film, engine
from tests.watch.test_watch_refused import HANGS, PREFILL, settled


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_a_long_chunked_prefill_is_no_stall(role: Any) -> None:
    """Nothing ends for half a minute, and probes wait behind it; but chunk after chunk is computed."""
    film = Film(engine(role=role))
    how: dict[str, Any] = {"tokens": "stands", "probe": {"ok": False}}
    film.looks(6, numbers={"worked": 100.0})
    chunks = [film.look(**how, numbers={"waiting": 2.0, "worked": 100.0 + 8192 * (n // 3)}) for n in range(40)]
    assert set(chunks) == {"healthy"}
    stands = {"waiting": 2.0, "worked": 100.0 + 8192 * 14}
    assert "confirmed" in film.looks(75, **how, numbers=stands), "and then no chunk comes any more"


def test_a_long_answer_is_no_stall() -> None:
    """SGLang counts its tokens when it ends."""
    film = Film(engine(role="both"))
    film.looks(6, numbers={"worked": 100.0})
    how: dict[str, Any] = {"tokens": "stands", "probe": {"ok": False}}
    assert set(film.look(**how, numbers={"running": 1.0, "worked": 101.0 + n}) for n in range(40)) == {"healthy"}


def test_decode_waits_for_a_long_chunked_prefill() -> None:
    film = settled()
    for n in range(40):
        held = {"prefill": {"waiting": 2.0, "worked": 100.0 + 8192 * (n // 3)}, "decode": {"transfer": 2.0}}
        film.look(held=held, probe=HANGS if n > 6 else None)
        assert film.state.phase != "confirmed"
        assert film.memory.states[PREFILL].phase == "healthy"


def test_what_prefill_computes_explains_nothing_while_its_hand_overs_stand() -> None:
    film = settled()
    phases = []
    for n in range(40):
        held = {"prefill": {"inflight": 2.0, "worked": 100.0 + 64 * n}, "decode": {"transfer": 2.0}}
        film.look(held=held, probe=HANGS if n > 6 else None)
        phases.append({film.state.phase, film.memory.states[PREFILL].phase})
    assert any("confirmed" in both for both in phases)


def test_a_slow_link_seen_from_both_ends_is_one_fact() -> None:
    held = {"prefill": {"inflight": 2.0}, "decode": {"transfer": 2.0}}
    film = settled()
    for _ in range(30):
        film.look(held=held)
        assert "confirmed" not in {film.state.phase, film.memory.states[PREFILL].phase}
    assert film.memory.states[PREFILL].phase == "suspect"
    assert any("in the same transfer" in e.text for e in film.memory.states[PREFILL].why), "it is told all the same"
    film.looks(3, held=held, probe=HANGS)
    assert film.memory.states[PREFILL].phase == "confirmed"
