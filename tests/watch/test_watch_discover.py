"""Discovery: process tables as they were seen → engines with roles and ranks; and /proc itself."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from closeranks.watch import procfs
from closeranks.watch.discover import Finder, _address, flag, group, launches, role_of, world_of
from closeranks.watch.procfs import Row
from closeranks.watch.recover_wire import endpoint_of
from closeranks.watch.snapshot import EngineSeen, Proc, ProcRole

PREFILL = "python3 -m sglang.launch_server --model-path m --port 31021 --tp-size 2 --disaggregation-mode prefill"
DECODE = "python3 -m sglang.launch_server --model-path m --port=31022 --tp 2 --disaggregation-mode=decode"


def row(pid: int, ppid: int, line: str, state: str = "S", start: int = 0, session: int = 1) -> Row:
    argv = (line,) if "::" in line.split(" ")[0] else tuple(line.split(" "))
    return Row(pid, start or pid, ppid, session, state, argv[0][:15] if argv else "", argv if line else ())


def table(*rows: Row) -> dict[int, Row]:
    return {r.pid: r for r in rows}


SGLANG = table(
    row(1, 0, "/sbin/init"),
    row(50, 1, f"timeout 300 {PREFILL}"),
    row(51, 50, PREFILL),
    row(52, 51, PREFILL),  # forked, no title yet
    row(53, 51, "sglang::scheduler_TP0"),
    row(54, 51, "sglang::scheduler_TP1"),
    row(55, 51, "sglang::detokenizer"),
    row(61, 1, DECODE),
    row(63, 61, "sglang::scheduler_TP0"),
    row(64, 61, "sglang::scheduler_TP1"),
    row(70, 1, "python3 -m sglang_router.launch_router --pd-disaggregation"),
    row(80, 1, "bash -c python3 -m sglang.launch_server --port 1"),
)


def test_a_pair_of_sglang_engines() -> None:
    decode, prefill = group(SGLANG)
    assert (decode.name, decode.role, decode.url) == ("decode-31022", "decode", "http://127.0.0.1:31022")
    assert (prefill.name, prefill.role, prefill.world) == ("prefill-31021", "prefill", 2)
    assert {p.label: p.pid for p in prefill.procs if p.role != "helper"} == {
        "launcher": 51, "TP0": 53, "TP1": 54, "detokenizer": 55}  # fmt: skip
    assert {p.engine for p in prefill.procs} == {"prefill-31021"}


@pytest.mark.parametrize("port", [" --port 30000", ""])
def test_two_engines_of_one_port_are_two_and_keep_their_names(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In network namespaces of their own; the second may come later, and the first end before it."""
    line = "python3 -m sglang.launch_server --model-path m --disaggregation-mode decode" + port
    first, second = [(row(n, 1, line), row(n + 1, n, "sglang::scheduler_TP0")) for n in (100, 200)]
    monkeypatch.setattr("closeranks.watch.procfs.listening", lambda pid: {30000: "127.0.0.1"} if pid % 100 == 0 else {})
    finder, names = Finder(), []
    for rows in (first, (*first, *second), (*first, *second), second):
        monkeypatch.setattr("closeranks.watch.procfs.scan", lambda known, again, rows=rows: table(*rows))
        found = finder.find()
        assert all(p.engine == e.name for e in found for p in e.procs)
        names.append({e.name: e.procs[0].pid for e in found if e.launcher is not None})
    both = {"decode-30000": 100, "decode-30000-pid200": 200}
    assert names == [{"decode-30000": 100}, both, both, {"decode-30000-pid200": 200}]


def test_what_is_left_of_a_dead_launcher_does_not_keep_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed, nobody has waited for it yet, and the engine is started again on the same port."""
    first, second = [(row(n, 1, DECODE), row(n + 1, n, "sglang::scheduler_TP0")) for n in (100, 200)]
    zombie = (row(100, 1, DECODE, "Z"),)
    monkeypatch.setattr("closeranks.watch.procfs.listening", lambda pid: {})
    finder, names = Finder(), []
    for rows in (first, zombie, (*zombie, *second), second):
        monkeypatch.setattr("closeranks.watch.procfs.scan", lambda known, again, rows=rows: table(*rows))
        names.append({e.name: e.procs[0].pid for e in finder.find()})
    assert names == [{"decode-31022": 100}, {"decode-31022": 100}, {"decode-31022": 200}, {"decode-31022": 200}]


@pytest.mark.parametrize(
    "word", ["9" * 5000, "99999999", "-1", "\u0663\u0660", "\u00b2", "0x1f", "", " ", "[" * 100_000, "{" * 100_000]
)
def test_a_command_line_of_rubbish_blinds_nobody(word: str) -> None:
    flags = ("--port", "--tp-size", "--pp-size", "--nnodes", "--kv-transfer-config", "--disaggregation-mode",
             "--disaggregation-bootstrap-port")  # fmt: skip
    words = [w for name in flags for w in (name, word)]
    odd = table(
        Row(300, 300, 1, 1, "S", "python3", ("python3", "-m", "sglang.launch_server", *words)),
        Row(400, 400, 1, 1, "S", "vllm", ("vllm", "serve", "m", *words)),
        row(500, 1, f"closeranks::rank decode TP{'9' * 5000}"),
    )
    found = group(SGLANG | odd)
    assert {"decode-31022", "prefill-31021"} <= {e.name for e in found}
    for engine in found:
        port = engine.url.rpartition(":")[2] if engine.url else "1"
        assert 0 < int(port) <= 65535
        endpoint_of(engine)


def test_a_vllm_engine() -> None:
    config = '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
    found = table(
        Row(10, 1, 1, 1, "S", "vllm", ("/v/bin/python", "/v/bin/vllm", "serve", "m", "--port", "8100",
                                      "--tensor-parallel-size", "2", "--kv-transfer-config", config)),
        row(11, 10, "VLLM::EngineCore"),
        row(12, 11, "VLLM::Worker_TP0"),
        row(13, 11, "VLLM::Worker_TP1"),
    )  # fmt: skip
    (engine,) = group(found)
    assert (engine.name, engine.kind, engine.role, engine.backend) == ("decode-8100", "vllm", "decode", "NixlConnector")
    assert {p.label for p in engine.deciders} == {"engine_core", "TP0", "TP1"}


def test_our_own_engines() -> None:
    found = table(
        row(5, 1, "python3 -m closeranks.cli.main serve"),
        row(6, 5, "closeranks::gateway"),
        row(7, 5, "closeranks::leader decode"),
        row(8, 5, "closeranks::rank decode TP0"),
        row(9, 5, "closeranks::rank decode TP1"),
        row(10, 5, "closeranks::leader prefill"),
        row(11, 5, "closeranks::rank prefill TP0"),
        row(12, 5, "closeranks::spare loaded"),
    )
    decode, prefill = group(found)
    assert (decode.name, decode.role, len(decode.deciders)) == ("decode-8000", "decode", 3), "the port it has unasked"
    assert (prefill.name, prefill.role, len(prefill.deciders)) == ("prefill-8000", "prefill", 2)
    assert any(p.role == "gateway" for p in decode.procs)


def test_two_services_of_ours_keep_their_names_over_a_restart() -> None:
    """A name that held a pid would have no past: cool-downs and ceilings count by it."""

    def lines(base: int, command: str) -> list[Row]:
        below = ("closeranks::gateway", "closeranks::leader decode", "closeranks::rank decode TP0")
        return [row(base, 1, command), *(row(base + n, base, line) for n, line in enumerate(below, 1))]

    first = "/v/bin/python3.11 -u /v/bin/closeranks serve --tp-size 2 --port 8001"
    found = {e.name: e for e in group(table(*lines(10, first), *lines(20, "/v/bin/closeranks serve --port=8002")))}
    assert set(found) == {"decode-8001", "decode-8002"}
    assert {e.own_name for e in found.values()} == {"decode"}
    assert [p.pid for p in found["decode-8001"].shared] == [11, 10]
    again = group(table(*lines(30, first)))
    assert [e.name for e in again] == ["decode-8001"]
    assert [e.name for e in group(table(*lines(30, first.replace("8001", "0"))))] == ["decode"], "drawn by the system"
    twice = group(table(*lines(10, first), *lines(20, first)))
    assert [e.name for e in twice] == ["decode-pid10", "decode-pid20"], "two network namespaces can have one port"
    other = group(table(row(9, 1, "bash -c closeranks serve --port 8001"), *lines(10, first)[1:]))
    assert [e.name for e in other] == ["decode"]


def test_a_reaped_rank_stays_listed_and_a_new_life_does_not_inherit_it() -> None:
    before = group(SGLANG)
    dead = {pid: r for pid, r in SGLANG.items() if pid != 54}
    prefill = next(e for e in group(dead, before) if e.role == "prefill")
    assert 54 in {p.pid for p in prefill.procs}
    anew = {pid: r for pid, r in dead.items() if pid not in (51, 53, 55)} | {
        91: row(91, 50, PREFILL),
        93: row(93, 91, "sglang::scheduler_TP0"),
    }
    prefill = next(e for e in group(anew, before) if e.role == "prefill")
    assert {p.pid for p in prefill.procs if p.role != "helper"} == {91, 93}


def test_ranks_whose_launcher_died_stay_with_their_engine() -> None:
    before = group(SGLANG)
    orphaned = {pid: r for pid, r in SGLANG.items() if pid not in (61,)}
    orphaned |= {63: row(63, 1, "sglang::scheduler_TP0"), 64: row(64, 1, "sglang::scheduler_TP1")}
    decode = next(e for e in group(orphaned, before) if e.role == "decode")
    assert {61, 63, 64} <= {p.pid for p in decode.procs}


def test_ranks_never_seen_with_a_launcher_are_an_engine_of_their_own() -> None:
    (engine,) = group(table(row(63, 1, "sglang::scheduler_TP0"), row(64, 1, "sglang::scheduler_TP1")))
    assert [p.label for p in engine.procs] == ["TP0", "TP1"]


def test_zombies_keep_the_name_that_they_had() -> None:
    dead = SGLANG | {54: Row(54, 54, 51, 1, "Z", "sglang::schedul", ("sglang::scheduler_TP1",))}
    assert {p.label for p in group(dead)[1].procs} >= {"TP0", "TP1"}
    unknown = SGLANG | {54: Row(54, 54, 51, 1, "Z", "sglang::schedul", ())}
    assert 54 in {p.pid for p in group(unknown)[1].procs}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (PREFILL, "sglang"),
        ("/usr/bin/python3.11 -u -X dev -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("vllm serve m", "vllm"),
        ("python /v/bin/sglang serve m", "sglang"),
        ("trtllm-serve m", "trtllm"),
        (f"timeout 9 {PREFILL}", None),
        (f"docker run x {PREFILL}", None),
        ("python3 -m sglang_router.launch_router", None),
        ("vllm bench serve", None),
        ("grep sglang.launch_server", None),
        ("python -m", None),
        ("", None),
    ],
)
def test_what_launches(line: str, kind: str | None) -> None:
    assert launches(tuple(line.split(" ")) if line else ()) == kind


def test_flags() -> None:
    argv = DECODE.split(" ")
    assert flag(argv, "--port") == "31022"
    assert role_of("sglang", argv) == "decode"
    assert world_of(argv) == 2
    assert role_of("vllm", ["--kv-transfer-config", "not json"]) == "both"
    assert world_of(["--tp-size", "x"]) == 1
    assert world_of(["--tp-size", "16", "--nnodes", "2"]) == 8
    assert flag(["--port"], "--port") == ""


def test_stat_lines_with_any_name() -> None:
    rest = " ".join(["S"] + ["7"] * 40)
    found = procfs.stat_fields(f"12 (a) b (c)) {rest}".encode())
    assert found is not None
    assert found[0] == "a) b (c)"
    assert procfs.stat_fields(b"") is None
    assert procfs.stat_fields(b"12 (x") is None


def test_this_process_is_read() -> None:
    own = procfs.row(os.getpid())
    main = procfs.main_thread(os.getpid())
    assert own is not None
    assert main is not None
    assert own.start_time == main.start_time
    assert main.state == "R"
    assert os.getpid() in procfs.scan({})
    assert procfs.main_thread(2**22 + 1) is None


@contextlib.contextmanager
def listener() -> Iterator[tuple[int, int]]:
    """A process that waits for a connection: (pid, port)."""
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.pid, int(child.stdout.readline())
        finally:
            child.kill()


def test_a_sleeping_process_stands_and_its_port_is_found() -> None:
    with listener() as (pid, port):
        assert procfs.listening(pid) == {port: "127.0.0.1"}
        deadline = time.monotonic() + 30
        before = procfs.main_thread(pid)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            after = procfs.main_thread(pid)
            if before == after and after is not None and after.state == "S":
                break
            before = after
        else:
            pytest.fail("it did not come to rest")


@pytest.mark.parametrize(("role", "asked"), [("leader", False), ("gateway", True)])
def test_what_a_leader_listens_on_is_no_http_server(role: ProcRole, asked: bool) -> None:
    """It is the control port, for gateways on other hosts."""
    with listener() as (pid, port):
        front = Proc(pid, 1, 1, role, "prefill", None, f"closeranks::{role}")
        found = _address(EngineSeen("prefill", "closeranks", "prefill", None, (front,)), front)
    assert found == ((port, f"http://127.0.0.1:{port}") if asked else (None, None))


def test_an_engine_in_a_network_namespace_of_its_own_is_reached_at_its_own_address() -> None:
    trie = """Main:
  +-- 0.0.0.0/1 2 0 2
     |-- 127.0.0.1
        /32 host LOCAL
     +-- 172.17.0.0/16 2 0 2
        |-- 172.17.0.0
           /16 link UNICAST
        |-- 172.17.0.2
           /32 host LOCAL
        |-- 172.17.255.255
           /32 link BROADCAST
"""
    assert procfs.own_address(trie) == "172.17.0.2"
    assert procfs.own_address(trie.replace("172.17.0.2\n           /32 host LOCAL", "")) == ""
    assert procfs.loopback_of(os.getpid()) == "127.0.0.1"
