"""Floods, endless lines, bombs, hostile pickles, noise: bounded time and memory, a clear note, the rest still read."""

import gzip
import io
import pickle
import random
import tracemalloc
from pathlib import Path

import pytest

from closeranks.diagnose import collect as collecting
from closeranks.diagnose.collect import collect
from closeranks.diagnose.facts import Event
from closeranks.diagnose.judge import diagnose_paths, diagnose_texts
from closeranks.diagnose.readers import line_readers
from closeranks.diagnose.scan import KEEP, Scanner, lines_of, prefilter
from closeranks.evidence.bundle import from_paths, from_texts

OOM = "[88.2] Out of memory: Killed process 4418 (sglang::schedul) total-vm:6kB\n"
BATCH = (
    "[2026-06-17 21:34:{:02d} TP0] Decode batch, #running-req: 9, #token: {}, token usage: 0.31, "
    "gen throughput (token/s): 311.20, #queue-req: 0\n"
)


def _no_failure(reader: str, error: Exception) -> None:
    raise AssertionError(reader) from error


def facts(text: str):
    return collect(from_texts([("x.log", text)])).facts


def test_line_numbers_are_those_of_the_file() -> None:
    text = "noise\n" * 9 + OOM + "\n\nnoise\n" + OOM
    assert [f.src.line for f in facts(text) if isinstance(f, Event)] == [10, 14]


def test_a_flood_of_one_line_does_not_push_out_another() -> None:
    text = "".join(BATCH.format(i % 60, i) for i in range(3 * KEEP)) + OOM
    text = OOM + text
    found = facts(text)
    kills = [f for f in found if isinstance(f, Event) and f.kind == "oom_kill"]
    batches = [f for f in found if isinstance(f, Event) and f.kind == "decode_batch"]
    assert [k.src.line for k in kills] == [1, 3 * KEEP + 2]
    assert len(batches) == 2 * KEEP
    assert batches[-1].src.line == 3 * KEEP + 1


def test_an_endless_line_is_cut_and_what_follows_is_read() -> None:
    text = "x" * (9 << 20) + "\n" + OOM
    tracemalloc.start()
    found = facts(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(f.kind, f.src.line) for f in found if isinstance(f, Event)] == [("oom_kill", 2)]
    assert peak < 10 * len(text)


def test_a_line_without_end_in_a_stream_needs_a_block_of_memory() -> None:
    class Endless(io.RawIOBase):
        left = 40 << 20

        def read(self, n: int = -1) -> bytes:
            n = min(n, self.left)
            self.left -= n
            return b"y" * n

    tracemalloc.start()
    readers = line_readers()
    list(Scanner("e", readers, prefilter(readers), _no_failure).facts(lines_of(Endless())))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20


def test_the_middle_of_a_huge_file_is_left_out_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "READ_BYTES", 12 << 20)
    monkeypatch.setattr(collecting, "MAX_TEXT", 1 << 20)
    path = tmp_path / "huge.log"
    filler = "noise line of a service that has nothing to say\n"
    with path.open("w") as f:
        f.write(OOM)
        for _ in range((30 << 20) // len(filler)):
            f.write(filler)
        f.write(OOM.replace("4418", "4419"))
    lines = 1 + (30 << 20) // len(filler) + 1
    found = collect(from_paths([path]))
    kills = [f for f in found.facts if isinstance(f, Event) and f.kind == "oom_kill"]
    assert [(k.get("pid"), k.src.line) for k in kills] == [(4418, 1), (4419, lines)]
    assert any("huge.log" in n and "MiB were read" in n for n in found.notes)


def test_a_bomb_a_hostile_pickle_and_noise_do_not_stop_the_rest(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "z.gz").write_bytes(gzip.compress(b"\0" * (8 << 20)))
    (tmp_path / "empty.log").write_bytes(b"")
    (tmp_path / "utf16.log").write_bytes(OOM.encode("utf-16"))
    verdict = diagnose_paths([tmp_path])
    assert verdict.main.cls == "DEAD_PEER"
    assert any("pickle not loaded: refused" in n for n in verdict.notes)
    assert any("noise.bin: binary" in n for n in verdict.notes)


def test_deep_and_broken_json_is_noise() -> None:
    for text in (
        "[\n" * 50_000,
        '{"a":' * 50_000,
        '{\n"entries": [' * 2000,
        "{\n" + '"\\' * 9999,
        '{"a": ' + "9" * 9000 + "}",
    ):
        assert diagnose_texts([("x.json", text)]).main.cls == "UNDETERMINED"


@pytest.mark.slow
def test_200_mb_of_log(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    block = "".join(
        BATCH.format(i % 60, i) if i % 3 else f"[2026-06-17 21:34:01] handled {i:x} for 10.0.0.{i % 250}\n"
        for i in range(20_000)
    )
    with path.open("w") as f:
        for _ in range((200 << 20) // len(block)):
            f.write(block)
        f.write(OOM)
    assert diagnose_paths([path]).main.cls == "DEAD_PEER"


def test_the_fast_search_of_a_block_misses_no_token() -> None:
    readers = line_readers()
    find = prefilter(readers)
    for token in {t for r in readers for t in r.TOKENS}:
        assert find.anchor.search(f"some words {token} and more".encode()), token
        assert find.token.search(token.encode()), token


def test_lines_between_words_are_found_with_their_numbers() -> None:
    rng = random.Random(7)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz_") for _ in range(rng.randint(2, 9))) for _ in range(900)]
    lines = [" ".join(rng.choices(words, k=rng.randint(0, 14))) for _ in range(3000)]
    at = sorted(rng.sample(range(3000), 40))
    for i in at:
        lines[i] = OOM.strip()
    for end in ("", "\n"):
        text = "\n".join(lines) + end
        found = [f.src.line for f in facts(text) if isinstance(f, Event) and f.kind == "oom_kill"]
        assert found == [i + 1 for i in at]
