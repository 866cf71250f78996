"""An engine that loads: whoever neither computes nor reads for long has stopped."""

from dataclasses import dataclass

import pytest

from closeranks.supervise import loading


@dataclass
class Rank:
    name: str
    pid: int


class Film:
    """What each rank has done by each look, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu, self.read = 0.0, {1: 0.0, 2: 0.0}, {1: 0, 2: 0}
        monkeypatch.setattr(loading.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(loading, "cpu_s", self.cpu.get)
        monkeypatch.setattr(loading, "read_bytes", self.read.get)
        leader, ranks = Rank("leader", 9), [Rank("rank0", 1), Rank("rank1", 2)]
        self.progress = loading.Progress("decode", [leader, *ranks])  # type: ignore[list-item]

    def look(self, seconds: float = 5.0) -> str:
        self.now += seconds
        return self.progress.fault()


def test_ranks_that_do_nothing_for_long_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    film = Film(monkeypatch)
    said = [film.look() for _ in range(30)]
    assert said[:24] == [""] * 24
    assert said[-1].startswith("rank0, rank1 did not load")


@pytest.mark.parametrize("what", ["cpu", "read"])
def test_one_that_computes_or_reads_is_waited_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    film = Film(monkeypatch)
    for _ in range(100):
        getattr(film, what)[2] += 1
        assert film.look() == ""


def test_time_in_which_nobody_looked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    film = Film(monkeypatch)
    film.look()
    assert film.look(3600.0) == ""
