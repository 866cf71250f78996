"""Connections on which something waits: in ss's form, of the right processes, without addresses."""

import os
import socket
import sys
from pathlib import Path

import pytest

from closeranks.diagnose.collect import collect
from closeranks.diagnose.facts import Event
from closeranks.evidence import sockets
from closeranks.evidence.bundle import from_texts

little = pytest.mark.skipif(sys.byteorder != "little", reason="the recorded table is of a little-endian machine")
# Of a link that was taken down with 1000 bytes on their way; `ss -tnop` said of it at the same time:
# ESTAB 0 1000 10.99.7.1:38232 10.99.7.2:5555 users:(("python3",pid=1301,fd=3)) timer:(on,1.368ms,4)
BLOCKED = "   0: 0107630A:9558 0207630A:15B3 01 000003E8:00000000 01:0000008A 00000004     0        0 11011392 2 0 326"
IDLE = "   1: 0107630A:9559 0207630A:15B3 01 00000000:00000000 02:0000008A 00000000     0        0 11011393 2 0 20"
MAPPED = (
    "   2: 0000000000000000FFFF00000107630A:9560 0000000000000000FFFF00000207630A:15B3 01 00000001:00000000 "
    "04:00000010 00000000     0        7 11011394 1 0 20"
)
LOOP6 = (
    "   3: B80D0120000000000000000001000000:9561 00000000000000000000000001000000:1F90 01 00000000:00000009 "
    "00:00000000 00000000     0        0 11011395 1 0 20"
)
OWNERS = {str(11011392 + n): [f'"VLLM::Worker_TP",pid=1301,fd={3 + n}'] for n in range(4)}


def shown(*lines: str) -> list[tuple[int, str]]:
    return list(sockets.rows(lines, OWNERS, sockets.Names()))


@little
def test_a_blocked_link_is_in_the_form_that_a_diagnosis_reads() -> None:
    ((again, row),) = shown(BLOCKED)
    assert again == 4
    facts = collect(from_texts([("decode-1/ss.txt", row + "\n")])).facts
    assert [(f.kind, f.data) for f in facts if isinstance(f, Event)] == [
        ("retransmits", {"pid": 1301, "held": 1000, "times": 4})
    ]


@little
def test_addresses_are_named_alike_and_nothing_else_of_them_is_kept() -> None:
    rows = [row for _, row in shown(BLOCKED, IDLE, MAPPED, LOOP6)]
    assert len(rows) == 3, "nothing waits on the idle one"
    assert "ip-1:38232" in rows[0]
    assert "ip-2:5555" in rows[0]
    assert "ip-1:38240" in rows[1]
    assert "ip-2:5555" in rows[1]
    assert "timer:(persist," in rows[1]
    assert "ip-3:38241" in rows[2]
    assert "::1:8080" in rows[2]
    assert not [row for row in rows if "10.99" in row or "2001:db8" in row]


@pytest.mark.parametrize("line", ["", "x " * 12, BLOCKED.replace("15B3", "port"), BLOCKED.replace("01:", "0x"),
                                  BLOCKED.replace("0207630A", "")])  # fmt: skip
def test_rows_of_rubbish_are_left_out(line: str) -> None:
    assert shown(line) == []


def test_the_connections_of_a_process_that_reads_nothing() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        near.sendall(b"x" * 5000)
        text = sockets.waiting([os.getpid()], sockets.Names())
        unread = [line for line in text.splitlines() if f":{near.getsockname()[1]} users:" in line]
        assert len(unread) == 1, text
        assert unread[0].split()[:2] == ["ESTAB", "5000"]
        assert f"pid={os.getpid()},fd={far.fileno()})" in unread[0]


def test_many_are_bounded_and_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ROWS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()) for _ in range(4)]
        ends += [server.accept()[0] for _ in range(4)]
        for end in ends[:4]:
            end.sendall(b"x")
        text = sockets.waiting([os.getpid(), 2**22 + 9], sockets.Names())
        for end in ends:
            end.close()
    assert text.count("ESTAB") == 1
    assert "more of them are left out" in text
    assert f"connections of {2**22 + 9} are unreadable" in text
