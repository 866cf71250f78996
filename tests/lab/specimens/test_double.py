"""The old design wedges under a mass abort as it did in production; the engine of this project does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import incident
from closeranks.lab.specimens.double import Double, start
from tests.e2e import tiny
from tests.e2e.reference import Expected
from tests.e2e.service import serve

pytestmark = pytest.mark.slow
SECONDS = 60.0
QUIET: list[str] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(model: Path) -> list[Expected]:
    return incident.expectations(model)


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Double]:
    with start(tmp_path, world=4) as running:
        yield running


def test_the_old_design_serves_until_many_clients_leave_at_once(double: Double, pool: list[Expected]) -> None:
    incident.calm(double, pool)
    assert double.stands() == []
    standing = incident.against_double(double, pool, SECONDS, QUIET.append)
    assert standing, "it did not wedge within a minute"
    assert double.health() == 200
    assert "Unexpected transfer worker error for room" in double.log or "Decode transfer failed" in double.log
    for engine in standing:
        stacks = double.stacks(engine)
        assert all({"all_reduce", "broadcast"} & set(names[:2]) for names in stacks), "every rank is in a collective"
        seen = {name for names in stacks for name in names}
        if engine == "prefill":
            assert all("check_hicache_events" in names for names in stacks), "HiCache's all_reduce"
        else:
            assert {"recv_requests", "poll_and_all_reduce"} <= seen, "some in the next broadcast, others in the poll"


def test_the_same_mass_aborts_do_not_wedge_closeranks(model: Path, pool: list[Expected]) -> None:
    with serve(model, *incident.FLAGS) as served:
        incident.against_closeranks(served, pool, SECONDS / 3, QUIET.append)
