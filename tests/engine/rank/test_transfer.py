"""Pages between real processes, over both backends: whole, in their place, verified; ends only on proof."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from closeranks.engine.rank.transfer import one_host
from closeranks.protocol import Check, Checked, Dropped, Progress, RoomId, Send, Sent
from tests.engine.rank.peers import Host

BACKENDS = ["shm", pytest.param("nixl", marks=pytest.mark.slow)]
ROOM = RoomId(1, 1)
SPLITS = [(1, 1), (3, 2), (2, 4)]
ALL_SPLITS = [(a, b) for a in range(1, 5) for b in range(1, 5) if (a, b) not in SPLITS]


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("ipc:///run/closeranks/8000/prefill.sock", True),
        ("tcp://127.0.0.1:7001", True),
        ("tcp://127.8.0.1:7001", True),
        ("tcp://localhost:7001", True),
        ("tcp://[::1]:7001", True),
        ("tcp://0.0.0.0:7001", False),
        ("tcp://10.0.0.5:7001", False),
        ("tcp://localhost.example:7001", False),
        ("", False),
    ],
)
def test_peers_of_a_leader_that_no_other_host_can_reach_are_on_this_one(endpoint: str, local: bool) -> None:
    assert one_host(endpoint) is local


def by_share(host: Host, sents: list[Sent]) -> list[list[int]]:
    """Sums per page and share number, put together from all ranks."""
    table = []
    for page in range(len(sents[0].sums)):
        row = [0] * host.shares
        for sent, memory in zip(sents, host.memories, strict=True):
            for share, found in zip(memory.shares, sent.sums[page], strict=True):
                row[share] = found
        table.append(row)
    return table


def hand_over(writer: Host, target: Host, pages: list[tuple[int, int]], transfer: int = 1) -> list[list[int]]:
    writer.step(meet=[target.peer], sends=[Send(transfer, ROOM, target.instance, pages)])
    sents = writer.wait(Sent)
    assert [s.error for s in sents] == [""] * writer.tp_size
    return by_share(writer, sents)


def whole_trip(backend: str, writers: int, targets: int, shares: int) -> None:
    pages = [(5, 3), (6, 4), (0, 11), (11, 0), (2, 7)]
    with Host(backend, writers, shares=shares) as writer, Host(backend, targets, shares=shares) as target:
        writer.fill(1), target.fill(2)
        before = {(p, s): target.read(p, s) for p in range(12) for s in range(shares)}
        target.step(meet=[writer.peer])
        table = hand_over(writer, target, pages)
        came = {b: a for a, b in pages}
        for page in range(12):
            for share in range(shares):
                wanted = writer.read(came[page], share) if page in came else before[page, share]
                assert target.read(page, share) == wanted, (page, share)
        target.step(checks=[Check(ROOM, [b for _, b in pages], table)])
        assert [c.bad for c in target.wait(Checked)] == [[]] * targets
        target.poke(11, shares - 1)
        target.step(checks=[Check(ROOM, [b for _, b in pages], table)])
        assert [bad for c in target.wait(Checked) for bad in c.bad] == [(11, shares - 1)]


@pytest.mark.parametrize(("writers", "targets"), SPLITS)
def test_shares_find_their_ranks_through_shared_memory(writers: int, targets: int) -> None:
    whole_trip("shm", writers, targets, 5)


@pytest.mark.parametrize(("writers", "targets"), [(1, 2)])
def test_shares_find_their_ranks_through_nixl(writers: int, targets: int) -> None:
    whole_trip("nixl", writers, targets, 3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "nixl"])
@pytest.mark.parametrize(("writers", "targets"), ALL_SPLITS)
def test_shares_find_their_ranks_for_every_pair_of_sizes(backend: str, writers: int, targets: int) -> None:
    whole_trip(backend, writers, targets, 4)


def expect_error(writer: Host, send: Send) -> str:
    writer.step(sends=[send])
    (sent,) = writer.wait(Sent)
    assert not (sent.error and sent.sums)
    return sent.error


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_peers_are_errors_of_their_transfers_and_of_nothing_else(backend: str) -> None:
    with Host(backend, 1) as writer, Host(backend, 1) as target, Host(backend, 1, layers=3) as other:
        assert "not known" in expect_error(writer, Send(1, ROOM, 77, [(0, 0)]))
        writer.step(meet=[other.peer])
        assert "shares of" in expect_error(writer, Send(2, ROOM, other.instance, [(0, 0)]))
        rubbish = [
            type(m)(**{f: getattr(m, f) for f in m.__struct_fields__} | {"address": b"?"}) for m in target.memories
        ]
        writer.step(meet=[type(target.peer)("test", 99, rubbish)])
        assert expect_error(writer, Send(3, ROOM, 99, [(0, 0)]))
        writer.step(meet=[target.peer, target.peer])
        assert "outside of the peer's pool" in expect_error(writer, Send(4, ROOM, target.instance, [(0, 12)]))
        assert hand_over(writer, target, [(1, 1)], 5)
        writer.step(drop=[target.instance])
        writer.wait(Dropped)
        assert "not known" in expect_error(writer, Send(6, ROOM, target.instance, [(0, 0)]))
        assert hand_over(writer, target, [(1, 1)], 7), "the same instance may be met again"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_that_has_ended_is_an_error_and_no_fault(backend: str) -> None:
    with Host(backend, 1) as writer:
        with Host(backend, 1) as target:
            peer = target.peer
            hand_over(writer, target, [(1, 1)])
        if backend == "nixl":  # a mapped pool outlives its process: writing there harms nobody and may succeed
            assert expect_error(writer, Send(2, ROOM, peer.instance, [(0, 0)]))
        writer.step(drop=[peer.instance])
        writer.wait(Dropped)
        writer.step(meet=[peer])
        assert expect_error(writer, Send(3, ROOM, peer.instance, [(0, 0)]))


@pytest.mark.slow
def test_a_broken_connection_is_mended_for_the_transfers_that_follow() -> None:
    """A failure is an error of what was under way; the peer, alive, is no leper after it."""
    with Host("nixl", 1) as writer, Host("nixl", 1) as target:
        writer.fill(1)
        target.step(meet=[writer.peer])
        hand_over(writer, target, [(1, 1)])
        assert writer.cut() > 0
        errors = [expect_error(writer, Send(n, ROOM, target.instance, [(2, 2)])) for n in range(2, 6)]
        assert errors[-1] == "", errors
        assert target.read(2, 0) == writer.read(2, 0)
        assert target.cut() > 0
        errors = [expect_error(writer, Send(n, ROOM, target.instance, [(3, 3)])) for n in range(6, 10)]
        assert errors[-1] == "", errors
        assert target.read(3, 0) == writer.read(3, 0)


def test_a_send_of_nothing_is_answered() -> None:
    with Host("shm", 2) as writer, Host("shm", 1) as target:
        writer.step(meet=[target.peer], sends=[Send(1, ROOM, target.instance, [])])
        assert [(s.error, s.sums) for s in writer.wait(Sent)] == [("", [])] * 2


def ends(host: Host) -> list[object]:
    """Notices that are not about progress."""
    return [notice for notice in host.notices if not isinstance(notice, Progress)]


def large(backend: str) -> Any:
    return Host(backend, 1, layers=8, shares=1, head_dim=64, page_size=512, pages=64)  # 2 MiB a page


@pytest.mark.slow
def test_a_write_to_a_stopped_peer_is_open_until_its_end_is_known() -> None:
    """Neither time nor a drop settles it: a late end, when it comes, is reported once, and only then the drop."""
    with large("nixl") as writer, large("nixl") as target:
        target.step(meet=[writer.peer])
        hand_over(writer, target, [(0, 0)])
        target.signal(signal.SIGSTOP)
        pages = [(p, p) for p in range(1, 64)]
        writer.step(sends=[Send(2, ROOM, target.instance, pages)], drop=[target.instance])
        until = time.monotonic() + 30.0
        while writer.hear(2.0):
            assert time.monotonic() < until, "it advances without an end: more than a connection's buffers take"
        assert ends(writer) == []
        target.signal(signal.SIGCONT)
        assert [s.error for s in writer.wait(Sent)] == [""]
        writer.wait(Dropped)


@pytest.mark.slow
def test_a_write_whose_peer_dies_is_settled_with_an_error() -> None:
    with large("nixl") as writer, large("nixl") as target:
        target.step(meet=[writer.peer])
        hand_over(writer, target, [(0, 0)])
        target.signal(signal.SIGSTOP)
        writer.step(sends=[Send(2, ROOM, target.instance, [(p, p) for p in range(1, 64)])])
        writer.hear(0.3)
        assert ends(writer) == []
        target.signal(signal.SIGKILL)
        assert writer.wait(Sent)[0].error


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_nothing_of_a_dead_writer_lands_after_the_target_dropped_it(attempt: int) -> None:
    """Bytes on their way survive their writer, so its death alone proves nothing; `Dropped` after it does."""
    with large("nixl") as target:
        with large("nixl") as writer:
            writer.fill(attempt)
            target.step(meet=[writer.peer])
            hand_over(writer, target, [(0, 0)])
            target.signal(signal.SIGSTOP)
            writer.step(sends=[Send(2, ROOM, target.instance, [(p, p) for p in range(1, 64)])])
            writer.hear(0.3)
        target.step(drop=[writer.instance])
        target.signal(signal.SIGCONT)
        target.wait(Dropped)
        landed = target.hash()
        time.sleep(0.5)
        assert target.hash() == landed


def test_dropping_a_peer_of_shared_memory_ends_its_writes_at_once() -> None:
    with large("shm") as writer, large("shm") as target:
        writer.fill(3)
        writer.step(
            meet=[target.peer],
            sends=[Send(1, ROOM, target.instance, [(p, p) for p in range(64)])],
            drop=[target.instance],
        )
        (dropped,) = writer.wait(Dropped)
        assert dropped.instance == target.instance
        (sent,) = writer.wait(Sent)
        assert "dropped" in sent.error
        before = target.hash()
        time.sleep(0.2)
        assert target.hash() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_transfers_at_once_are_each_answered_once(backend: str) -> None:
    with Host(backend, 2) as writer, Host(backend, 2) as target:
        writer.fill(1)
        target.step(meet=[writer.peer])
        sends = [Send(n, RoomId(n, 1), target.instance, [(n % 12, (n + 5) % 12)]) for n in range(1, 101)]
        writer.step(meet=[target.peer], sends=sends)
        answered = [[s.transfer for s in writer.wait(Sent)] for _ in sends]
        assert sorted(a[0] for a in answered) == sorted(a[1] for a in answered) == list(range(1, 101))
        writer.hear(0.2)
        assert ends(writer) == []


def test_a_check_that_does_not_cover_its_pages_is_a_fault() -> None:
    with Host("shm", 1) as host:
        host.step(checks=[Check(ROOM, [1, 2], [[1, 2, 3, 4]])])
        with pytest.raises(AssertionError, match="do not cover"):
            host.wait(Checked, 5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_drills_stick_fail_write_late_and_corrupt(backend: str) -> None:
    faults = (
        "transfer.start:stick,transfer=1,seconds=1",
        "transfer.start:fail,transfer=2",
        "transfer.start:late,transfer=3,seconds=2",
    )
    with (
        Host(backend, 1, faults) as writer,
        Host(backend, 1, ("rank.arrived:corrupt",)) as target,
    ):
        writer.fill(1)
        target.step(meet=[writer.peer])
        sends = [Send(n, ROOM, target.instance, [(n, n)]) for n in (1, 2, 3, 4)]
        writer.step(meet=[target.peer], sends=sends)
        sents = [writer.wait(Sent)[0] for _ in sends]
        assert [(s.transfer, bool(s.error)) for s in sorted(sents, key=lambda s: s.transfer)] == [
            (1, False),
            (2, True),
            (3, True),
            (4, False),
        ]
        assert sents[3].transfer == 1, "it stuck for a while"
        assert [s.transfer for s in sents if s.unsure] == [2, 3] or [s.transfer for s in sents if s.unsure] == [3, 2]
        assert not any(target.read(2, 0))
        assert not any(target.read(3, 0))
        writer.step(drop=[target.instance])
        writer.wait(Dropped)
        assert target.read(3, 0) == writer.read(3, 0), "it has written although it was reported failed, and ended"
        table = by_share(writer, [s for s in sents if s.transfer == 4])
        target.step(checks=[Check(ROOM, [4], table)])
        assert target.wait(Checked)[0].bad == [(4, 0)]


@pytest.mark.slow
def test_a_transport_that_ucx_does_not_have_is_named() -> None:
    """In a process of its own: UCX reads its environment once."""
    code = (
        "import torch\n"
        "from closeranks.engine.rank.planes import PageLayout, Pool\n"
        "from closeranks.engine.rank.transfer.nixl import NixlBackend\n"
        "NixlBackend(Pool(PageLayout(('k', 'v'), 1, 1, 4, torch.float32), 2, 4, 0, 1), 'x', 'pigeon')\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "ValueError: NIXL's UCX cannot be set up with {'UCX_TLS': 'pigeon'}" in done.stderr
    assert "--nixl-transport" in done.stderr
