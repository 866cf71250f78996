"""What of a `closeranks serve` is ended: the one engine, the gateway alone, or the whole service; never more."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.watch import procfs
from closeranks.watch.discover import group
from closeranks.watch.procfs import Row
from closeranks.watch.recover_units import is_own_engine, is_service, to_blame, units_of
from closeranks.watch.snapshot import EngineSeen, Evidence, State


def row(pid: int, ppid: int, line: str) -> Row:
    argv = (line,) if "::" in line.split(" ")[0] else tuple(line.split(" "))
    return Row(pid, pid, ppid, 1, "S", argv[0][:15], argv)


def service(base: int, port: int | None = 8000) -> tuple[EngineSeen, ...]:
    """A pair of two ranks each, its gateway and its supervisor, at pids that nobody has."""
    lines = ["closeranks::gateway"]
    for engine in ("decode", "prefill"):
        lines += [f"closeranks::leader {engine}", *(f"closeranks::rank {engine} TP{n}" for n in range(2))]
    rows = [
        row(base, 1, "/v/bin/python3 /v/bin/closeranks serve --tp-size 2 --port 0"),
        row(base + 50, base, "closeranks::spare"),
    ]
    rows += [row(base + n, base, line) for n, line in enumerate(lines, 1)]
    found = group({r.pid: r for r in rows})
    url = f"http://127.0.0.1:{port}" if port else None
    return tuple(EngineSeen(e.name, e.kind, e.role, url, e.procs, e.argv) for e in found)


FAR = 2**22 + 1000


def confirmed(engine: str, *ranks: str | None) -> dict[str, State]:
    return {engine: State(engine, "confirmed", tuple(Evidence("proc", r, "x") for r in ranks), 0.0)}


def test_gateway_and_service_are_units_of_their_own() -> None:
    units = {u.name: u for u in units_of(service(FAR))}
    assert set(units) == {"decode", "prefill", "gateway-8000", "service-8000"}
    assert {p.label for p in units["decode"].procs} == {"leader", "TP0", "TP1"}
    assert [p.label for p in units["gateway-8000"].procs] == ["gateway"]
    whole = units["service-8000"]
    assert whole.procs[0].pid == FAR, "who started the others comes first"
    assert len(whole.procs) == 8
    assert is_service(whole)
    assert is_own_engine(units["decode"])
    assert not is_own_engine(units["gateway-8000"])


def test_two_services_without_a_known_port_are_told_apart() -> None:
    both = (*service(FAR, None), *service(FAR + 500, None))
    names = [u.name for u in units_of(both)]
    assert names.count(f"service-pid{FAR}") == names.count(f"service-pid{FAR + 500}") == 1


@pytest.mark.parametrize(
    ("ranks", "units"),
    [
        ((None,), {"decode"}),
        (("TP1",), {"decode"}),
        (("TP1", None), {"decode"}),
        (("gateway",), {"gateway-8000"}),
        ((None, "gateway"), {"gateway-8000"}),
        (("gateway", "TP0"), {"gateway-8000", "decode"}),
        (("supervisor",), {"service-8000"}),
        (("supervisor", "gateway", "TP0"), {"service-8000"}),
    ],
)
def test_evidence_names_the_part(ranks: tuple[str | None, ...], units: set[str]) -> None:
    assert set(to_blame(["decode"], service(FAR), confirmed("decode", *ranks))) == units


def test_a_frozen_gateway_shows_in_both_engines_and_is_ended_once() -> None:
    states = confirmed("decode", "gateway") | confirmed("prefill", "gateway")
    assert to_blame(["decode", "prefill"], service(FAR), states) == ("gateway-8000",)


def test_a_service_covers_its_parts() -> None:
    assert to_blame(["decode", "gateway-8000", "service-8000"], service(FAR)) == ("service-8000",)


def test_other_engines_and_unknown_names_stay_as_they_are() -> None:
    other = EngineSeen("decode-1", "sglang", "decode", "http://127.0.0.1:1", ())
    assert to_blame(["decode-1", "nobody"], (other,), confirmed("decode-1", "gateway")) == ("decode-1", "nobody")
    assert units_of((other,)) == (other,)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(("role", "unit"), [("gateway", "gateway-8000"), ("supervisor", "service-8000")])
def test_what_is_stopped_now_is_seen_without_a_watch(role: str, unit: str, child: "subprocess.Popen[bytes]") -> None:
    """`closeranks recover` by hand has no evidence but what it sees."""
    made = procfs.row(child.pid)
    assert made is not None
    engines = []
    for engine in service(FAR):
        procs = [p for p in engine.procs if p.role != role]
        old = next(p for p in engine.procs if p.role == role)
        new = type(old)(child.pid, made.start_time, old.ppid, old.role, old.engine, None, old.title)
        engines.append(EngineSeen(engine.name, engine.kind, engine.role, engine.url, (*procs, new), engine.argv))
    assert to_blame(["decode"], engines) == ("decode",)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert to_blame(["decode"], engines) == (unit,)


@given(
    ranks=st.lists(st.sampled_from([None, "gateway", "supervisor", "leader", "TP0", "TP1"]), max_size=4),
    names=st.sets(st.sampled_from(["decode", "prefill", "gateway-8000", "service-8000"]), min_size=1),
)
def test_whatever_is_blamed_nothing_is_ended_twice_and_no_engine_takes_its_gateway_along(
    ranks: list[str | None], names: set[str]
) -> None:
    engines = service(FAR)
    states = confirmed("decode", *ranks) | confirmed("prefill", *ranks)
    units = {u.name: u for u in units_of(engines)}
    blamed = to_blame(names, engines, states)
    assert blamed
    pids = [p.pid for name in blamed for p in units[name].procs]
    assert len(pids) == len(set(pids))
    for name in set(blamed) & {"decode", "prefill"}:
        assert not {p.role for p in units[name].procs} & {"gateway", "supervisor"}
