"""Real rank processes under a small leader: joining, steps, digests, hand-over, faults, stops."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from closeranks.protocol import (
    Begin,
    Check,
    Checked,
    Compile,
    Compiled,
    Dropped,
    Joined,
    RankFault,
    Report,
    RoomId,
    Row,
    Sampling,
    Send,
    Sent,
    Step,
)
from tests.e2e import tiny
from tests.engine.rank.drive import Engine

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 90))
ROOM = RoomId(5, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def begin(tokens: list[int], pages: list[int]) -> Begin:
    return Begin(Sampling(), tokens, len(PROMPT), pages)


def generate(engine: Engine, count: int, pages: list[int]) -> list[int]:
    """Prefill in two chunks and decode greedily in one engine."""
    engine.step(rows=[Row(0, 0, 32, begin=begin(PROMPT, pages))])
    tokens = engine.step(rows=[Row(0, 32, 18, sample=True)]).tokens
    while len(tokens) < count:
        tokens += engine.step(rows=[Row(0, len(PROMPT) + len(tokens) - 1, 1, sample=True)]).tokens
    return tokens


@pytest.fixture(scope="module")
def expected(model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    with Engine(tmp_path_factory.mktemp("run"), "both", 1, model, cache) as engine:
        tokens = generate(engine.join(), 8, [3, 1, 7, 2, 9])
        assert engine.stop() == [0]
    return tokens


def test_two_ranks_sample_the_same_as_one(tmp_path: Path, model: Path, cache: Path, expected: list[int]) -> None:
    with Engine(tmp_path, "both", 2, model, cache) as engine:
        engine.join()
        assert [j.memory.shares for j in engine.joined] == [[0, 1], [2, 3]]
        assert generate(engine, 8, [4, 5, 6, 8, 11]) == expected
        assert engine.step().tokens == []
        assert engine.stop() == [0, 0]
        assert "rank stopped" in engine.log(1)


@pytest.mark.parametrize("backend", ["shm", "nixl"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_a_prompt_is_handed_over(
    tmp_path: Path, model: Path, cache: Path, expected: list[int], backend: str, prefill_tp: int, decode_tp: int
) -> None:
    options = {"transfer_backend": backend}
    with (
        Engine(tmp_path, "prefill", prefill_tp, model, cache, **options) as prefill,
        Engine(tmp_path, "decode", decode_tp, model, cache, **options) as decode,
    ):
        prefill.join(), decode.join()
        assert prefill.joined[0].fingerprint == decode.joined[0].fingerprint
        prefill.step(meet=[decode.peer()])
        decode.step(meet=[prefill.peer()])
        source, target = [3, 1, 7, 2, 9], [10, 11, 5, 30, 31]
        # Pages that a chunk has finished go at once, the rest with the last chunk.
        first = Send(1, ROOM, decode.instance, list(zip(source[:2], target[:2], strict=True)))
        rest = Send(2, ROOM, decode.instance, list(zip(source[2:4], target[2:4], strict=True)))
        prefill.step(rows=[Row(0, 0, 32, begin=begin(PROMPT, source))], sends=[first])
        tokens = prefill.step(rows=[Row(0, 32, 18, sample=True)], sends=[rest]).tokens
        sums: list[dict[int, int]] = []
        for transfer in (1, 2):
            parts = prefill.wait_all(Sent, lambda s, t=transfer: s.transfer == t)
            assert [p.error for p in parts] == [""] * prefill_tp
            for page in range(2):
                by_share: dict[int, int] = {}
                for part, joined in zip(parts, prefill.joined, strict=True):
                    by_share |= dict(zip(joined.memory.shares, part.sums[page], strict=True))
                sums.append(by_share)
        table = [[page[share] for share in range(4)] for page in sums]
        wrong = [list(row) for row in table]
        wrong[2][3] ^= 1
        decode.step(checks=[Check(ROOM, target[:4], table)])
        assert [c.bad for c in decode.wait_all(Checked)] == [[]] * decode_tp
        decode.step(checks=[Check(ROOM, target[:4], wrong)])
        assert [bad for c in decode.wait_all(Checked) for bad in c.bad] == [(target[2], 3)]
        position = len(PROMPT)
        tokens += decode.step(rows=[Row(4, position, 1, sample=True, begin=begin(PROMPT + tokens, target))]).tokens
        while len(tokens) < 8:
            tokens += decode.step(rows=[Row(4, PROMPT.__len__() + len(tokens) - 1, 1, sample=True)]).tokens
        assert tokens == expected
        decode.step(drop=[prefill.instance])
        decode.wait_all(Dropped)
        prefill.step(drop=[decode.instance])
        prefill.wait_all(Dropped)
        assert prefill.stop() == [0] * prefill_tp
        assert decode.stop() == [0] * decode_tp


@pytest.mark.parametrize("wrong", ["epoch", "gap", "again", "rubbish", "page", "slot"])
def test_a_rank_that_is_told_something_impossible_faults(tmp_path: Path, model: Path, cache: Path, wrong: str) -> None:
    with Engine(tmp_path, "both", 1, model, cache) as engine:
        engine.join().step()
        bad = {
            "epoch": Step(2, 2),
            "gap": Step(1, 3),
            "again": Step(1, 1),
            "page": Step(1, 2, rows=[Row(0, 0, 3, begin=begin([1, 2, 3], [99]))]),
            "slot": Step(1, 2, rows=[Row(0, 0, 3)]),
        }
        if wrong == "rubbish":
            engine.socket.send_multipart([b"step:0", b"\xc1rubbish"])
        else:
            engine.tell(bad[wrong])
        fault = engine.wait(RankFault)
        assert fault.name in ("StepOrderFault", "DecodeError", "InvalidStep")
        assert engine.ranks[0].wait(60) == 70
        assert fault.name in engine.log(0)


def test_drills_raise_kill_and_differ(tmp_path: Path, model: Path, cache: Path) -> None:
    faults = ["rank.row:raise,token=77", "rank.digest:wrong,rank=1,n=2", "rank.forward:kill,rank=1,n=3"]
    with Engine(tmp_path, "both", 2, model, cache, fault=faults, collective_deadline_s=1.0) as engine:
        engine.join().step()
        n = engine.send_step()
        assert len({r.digest for r in engine.wait_all(Report, lambda r: r.n == n)}) == 2
        engine.send_step(rows=[Row(0, 0, 3, sample=True, begin=begin([1, 2, 3], [0]))])
        assert "rank 1 did not advance" in engine.wait(RankFault).detail
        assert engine.ranks[1].wait(60) == -signal.SIGKILL
    with Engine(tmp_path, "both", 1, model, cache, epoch=2, fault=faults) as engine:
        engine.join().step(rows=[Row(0, 0, 3, sample=True, begin=begin([1, 2, 3], [0]))])
        engine.send_step(rows=[Row(0, 0, 3, sample=True, begin=begin([1, 77, 3], [0]))])
        assert engine.wait(RankFault).name == "InjectedFault"


def test_a_wrong_model_is_said_to_the_leader(tmp_path: Path, cache: Path) -> None:
    with Engine(tmp_path, "both", 1, tmp_path / "nothing", cache) as engine:
        fault = engine.wait(RankFault)
        assert "nothing" in fault.detail
        assert engine.ranks[0].wait(60) == 70


def test_a_rank_without_its_sibling_faults_and_names_it(tmp_path: Path, model: Path, cache: Path) -> None:
    with Engine(tmp_path, "both", 2, model, cache, collective_deadline_s=1.0) as engine:
        engine.join().step()
        engine.ranks[1].send_signal(signal.SIGSTOP)
        engine.send_step(rows=[Row(0, 0, 3, sample=True, begin=begin([1, 2, 3], [0]))])
        fault = engine.wait(RankFault)
        assert fault.name == "CollectiveTimeout"
        assert "rank 1 did not advance" in fault.detail
        assert engine.ranks[0].wait(60) == 70
        beats = [p for p in engine.progress if p.rank == 0]
        assert beats, "a rank that waits beats"
        assert {p.n for p in beats} == {2}
        assert len({p.ticks for p in beats}) == 1, "waiting is no progress"


def test_a_stopped_peer_holds_the_transfer_open_and_the_drop_back(tmp_path: Path, model: Path, cache: Path) -> None:
    """A write that is under way when its peer is dropped stays unsettled, its pages held, until its end is known."""
    options = {"transfer_backend": "nixl", "num_pages": 16, "page_size": 1024}
    with (
        Engine(tmp_path, "prefill", 1, model, cache, **options) as prefill,
        Engine(tmp_path, "decode", 1, model, cache, **options) as decode,
    ):
        prefill.join(), decode.join()
        prefill.step(meet=[decode.peer()])
        decode.step(meet=[prefill.peer()])
        prefill.step(sends=[Send(1, ROOM, decode.instance, [(0, 0)])])
        assert prefill.wait(Sent).error == ""
        decode.ranks[0].send_signal(signal.SIGSTOP)
        pages = [(p, p) for p in range(16)]
        prefill.step(sends=[Send(2, ROOM, decode.instance, pages)], drop=[decode.instance])
        until = time.monotonic() + 1.5
        while prefill.listen(until):
            pass
        assert not [m for m in prefill.said if isinstance(m, Sent | Dropped)]
        prefill.step(sends=[Send(3, ROOM, decode.instance, [(0, 0)])])
        assert "being dropped" in prefill.wait(Sent).error
        decode.ranks[0].send_signal(signal.SIGCONT)
        assert prefill.wait(Sent).error == ""
        prefill.wait(Dropped)


def test_a_dead_peer_settles_its_transfers_and_is_no_fault(tmp_path: Path, model: Path, cache: Path) -> None:
    options = {"transfer_backend": "nixl", "num_pages": 16, "page_size": 1024}
    with (
        Engine(tmp_path, "prefill", 1, model, cache, **options) as prefill,
        Engine(tmp_path, "decode", 1, model, cache, **options) as decode,
    ):
        prefill.join(), decode.join()
        prefill.step(meet=[decode.peer()])
        decode.step(meet=[prefill.peer()])
        decode.ranks[0].send_signal(signal.SIGSTOP)
        prefill.step(sends=[Send(2, ROOM, decode.instance, [(p, p) for p in range(16)])])
        decode.ranks[0].kill()
        assert prefill.wait(Sent).error
        prefill.step(sends=[Send(3, ROOM, decode.instance, [(0, 0)])])
        assert prefill.wait(Sent).error
        prefill.step(drop=[decode.instance])
        prefill.wait(Dropped)
        assert isinstance(prefill.step(), Report)


def test_a_rank_ends_with_its_parent(tmp_path: Path, model: Path, cache: Path) -> None:
    """The kernel kills it, also while the parent is killed itself: no rank outlives the process that started it."""
    with Engine(tmp_path, "both", 1, model, cache) as engine:
        engine.join()
        settings = engine.run_dir / "rank0.json"
        code = (
            "import subprocess, sys;"
            "p = subprocess.Popen([sys.executable, '-m', 'closeranks.engine.rank', sys.argv[1]]);"
            "print(p.pid, flush=True); p.wait()"
        )
        engine.ranks[0].kill()
        engine.ranks[0].wait()
        parent = subprocess.Popen([sys.executable, "-c", code, str(settings)], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        engine.wait(Joined)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        until = time.monotonic() + 60
        while state(pid) not in ("", "Z") and time.monotonic() < until:
            time.sleep(0.05)
        assert state(pid) in ("", "Z")


def state(pid: int) -> str:
    """State letter of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def test_grammars_are_compiled_beside_the_steps_and_said_to_the_leader(
    model: Path, cache: Path, tmp_path: Path, expected: list[int]
) -> None:
    pytest.importorskip("xgrammar")
    grammar = 'ebnf:root ::= "ab" [0-9]'
    with Engine(tmp_path, "both", 2, model, cache) as engine:
        engine.join()
        engine.tell(Compile(1, 1, "json_schema:" + '{"type": "object", "properties": {"x": {"type": "foo"}}}'))
        engine.tell(Compile(1, 2, grammar))
        assert generate(engine, 3, [0, 1, 2, 3, 4]) == expected[:3]
        assert engine.wait(Compiled).error.startswith("x: cannot be enforced")
        said = engine.wait(Compiled)
        assert (said.number, said.rank, said.error) == (2, 0, "")
        held = Begin(Sampling(grammar=grammar, stop_ids=(2,)), PROMPT, len(PROMPT), [5, 6, 7, 8])
        first = engine.step(rows=[Row(1, 0, len(PROMPT), sample=True, begin=held)]).tokens
        assert len(first) == 1
        engine.tell(Compile(1, 0, "", [2]))
        engine.send_step(rows=[Row(2, 0, len(PROMPT), sample=True, begin=held)])
        assert engine.wait(RankFault).name == "NotCompiled"
