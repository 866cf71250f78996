"""Bundles: nothing of the user in them, bounded, whole or not there."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from closeranks.evidence import capture, gather
from closeranks.watch import incident, procfs, verdict
from closeranks.watch.incident import Keeper
from closeranks.watch.signals.counters import CountersSignal
from closeranks.watch.signals.fetch import Client
from closeranks.watch.signals.gpu import GpuSignal
from closeranks.watch.signals.loads import LoadsSignal
from closeranks.watch.signals.log import LogSignal
from closeranks.watch.signals.stacks import Rounds
from closeranks.watch.snapshot import EngineSeen, Evidence, Proc, Snapshot, State
from tests.watch.test_watch_signals import served

WORDS = "the patient Erika Mustermann was told"
KEY = "sk-live-9f8e7d6c5b4a39281706"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
PASSWORD = "correct-horse-battery"
SECRETS = (WORDS, KEY, TOKEN, PASSWORD, "Mustermann")

LOG = f"""[x] server_args=ServerArgs(model_path='tiny', api_key='{KEY}', admin_api_key="{PASSWORD}")
[x] The server is fired up and ready to roll!
[x] Receive: obj=GenerateReqInput(rid='1', text='{WORDS}', input_ids=[1, 2], sampling_params={{}})
[x] Finish: obj=GenerateReqInput(rid='1', text="{WORDS}"), out={{'text': '{WORDS}', 'meta_info': {{}}}}
INFO 11-29 [logger.py:39] Received request cmpl-1: prompt: '{WORDS}', params: SamplingParams(n=1), prompt_token_ids: [3]
INFO 11-29 [logger.py:60] Generated response cmpl-1: output: '{WORDS}', output_token_ids: [5]
{{"messages": [{{"role": "user", "content": "{WORDS}"}}]}}
{{"level": "info", "content": "{WORDS}"}}
[x] Authorization: Bearer {KEY}
[x] loading from https://user:{PASSWORD}@models.example/x with HF_TOKEN={TOKEN}
[x TP0] Scheduler hit an exception: Traceback
KeyError: prompt="{WORDS}"
"""
CHILD = "import signal, setproctitle; print(1, flush=True); signal.pause()"


@pytest.fixture
def child(tmp_path: Path):  # type: ignore[no-untyped-def]
    env = {**os.environ, "SGLANG_API_KEY": KEY, "VLLM_API_KEY": KEY, "HF_TOKEN": TOKEN, "NCCL_DEBUG": "INFO",
           "OTHER": PASSWORD, "SGLANG_NOTE": f"password={PASSWORD}"}  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", CHILD, "--api-key", KEY], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def engine_of(process: "subprocess.Popen[bytes]", url: str, log: Path) -> EngineSeen:
    row = procfs.row(process.pid)
    assert row is not None
    procs = (Proc(process.pid, row.start_time, row.ppid, "launcher", "decode-1", None, "python3"),)
    argv = ("python3", "-m", "sglang.launch_server", "--api-key", KEY, f"--admin-api-key={PASSWORD}", "--tp-size", "2")
    return EngineSeen("decode-1", "sglang", "decode", url, procs, argv, logs=(str(log),))


def test_nothing_of_the_user_is_in_a_bundle(tmp_path: Path, child: "subprocess.Popen[bytes]") -> None:
    log = tmp_path / "engine.log"
    log.write_text(LOG)

    async def info(request: web.Request) -> web.Response:
        secrets = {"api_key": KEY, "admin_api_key": PASSWORD, "hf_token": TOKEN}
        states = [{"last_prompt": WORDS, "text": WORDS}]
        return web.json_response({"model_path": "tiny", "version": "0.5.13", **secrets, "internal_states": states})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f'sglang:num_running_reqs{{tp_rank="0",prompt="{WORDS}"}} 1.0\n# token={TOKEN}\n')

    async def go() -> None:
        runner, url = await served({"/server_info": info, "/metrics": metrics})
        client = Client(5.0)
        engine = engine_of(child, url, log)
        pages, loads, logs = CountersSignal(client), LoadsSignal(client), LogSignal()
        for _ in range(2):
            await pages.read([engine], frozenset())
        logs.read_now([engine])
        keeper = Keeper(tmp_path / "bundles", client, pages, loads, logs, GpuSignal())
        keeper._judge = verdict.Judge(longest_s=500)
        await keeper.prepare([engine])
        rounds = Rounds(time.monotonic(), (engine,))
        rounds.first["decode-1/launcher"] = f"Process 1: python3 -m sglang.launch_server --api-key {KEY}\n"
        why = (Evidence("log", None, "its log says: the scheduler raised an exception"),)
        state = State("decode-1", "confirmed", why, 0.0)
        found = await keeper.keep(state, Snapshot(1.0, 1.0, (engine,), {}), {"decode-1": state}, rounds)
        await keeper.close()
        await client.close()
        await runner.cleanup()
        folder = Path(found.folder)
        names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        assert {"manifest.json", "watch.json", "verdict.html", "issue.md", "decode-1/engine.log", "decode-1/flags.txt",
                "decode-1/environment.txt", "decode-1/ss.txt", "decode-1/metrics_1.txt", "decode-1/metrics_2.txt",
                "decode-1/server_info.json"} <= names  # fmt: skip
        for path in folder.rglob("*"):
            text = path.read_text() if path.is_file() else ""
            assert not [s for s in SECRETS if s in text], path
        kept = (folder / "decode-1" / "engine.log").read_text()
        assert "Scheduler hit an exception" in kept
        assert "ready to roll" in kept
        assert "NCCL_DEBUG=INFO" in (folder / "decode-1" / "environment.txt").read_text()
        assert folder.stat().st_mode & 0o077 == 0
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["verdict"] == found.verdict.cls
        assert set(manifest["files"]) == names - {"manifest.json"}

    asyncio.run(go())


@pytest.mark.parametrize(
    "line",
    [
        f"text='{WORDS}'", f'"content": "{WORDS}"', f"prompt: '{WORDS}'", f"input={{'a': '{WORDS}'}}",
        f"messages=[{{'role': 'user', 'content': '{WORDS}'}}]", f"obj=ChatCompletionRequest(model='m', x='{WORDS}')",
        f"arguments='{{\"name\": \"{WORDS}\"}}'", f'"query":"{WORDS}"',
    ],
)  # fmt: skip
def test_requests_in_log_lines_are_cut(line: str) -> None:
    assert WORDS not in gather.scrub(f"[2026-11-29 18:02:27 TP0] {line} and more\nnext line")
    assert "next line" in gather.scrub(f"{line}\nnext line")


@pytest.mark.parametrize(
    "line",
    [
        "[x TP0] Decode batch, #running-req: 4, #token: 2048, token usage: 0.01, #transfer-req: 4, #queue-req: 0",
        "Unexpected transfer worker error for room 5703557506917441074",
        "AssertionError: First message should be b'NixlMsgGuard'. Foreign traffic?",
        "    all_reduce (torch/distributed/distributed_c10d.py:3151)",
        "vllm:num_requests_running{engine=\"0\"} 3.0",
        "input throughput (token/s): 9120.44",
    ],
)  # fmt: skip
def test_what_a_diagnosis_needs_stays(line: str) -> None:
    assert gather.scrub(line) == line


def test_files_are_bounded() -> None:
    files = gather.Files()
    files.add("big", b"x\n" * gather.FILE_BYTES, clean=False)
    assert len(files.contents["big"]) <= gather.FILE_BYTES
    for number in range(40):
        files.add(f"more{number}", b"y" * gather.FILE_BYTES, clean=False)
    assert sum(map(len, files.contents.values())) <= gather.TOTAL_BYTES
    assert any("left out" in note for note in files.notes)


def full_after(monkeypatch: pytest.MonkeyPatch, kilobytes: int) -> None:
    """A disk that takes so much and then half of a file."""
    left = kilobytes << 10
    write = Path.write_bytes

    def bounded(self: Path, data: bytes) -> int:
        nonlocal left
        fits = data[:left]
        left -= len(fits)
        write(self, fits)
        if len(fits) < len(data):
            raise OSError(28, "No space left on device")
        return len(data)

    monkeypatch.setattr(Path, "write_bytes", bounded)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **how: self.write_bytes(text.encode()))


def bundle_of(*kilobytes: int) -> gather.Files:
    files = gather.Files()
    for number, size in enumerate(kilobytes):
        files.add(f"decode-1/{number}.txt", b"x" * (size << 10), clean=False)
    return files


def test_what_a_full_disk_does_not_take_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_after(monkeypatch, 20)
    with monkeypatch.context() as nothing:
        nothing.setattr(capture, "write_manifest", lambda folder, facts: said.update(facts))
        said: dict[str, object] = {}
        folder = gather.store(bundle_of(10, 30, 0), tmp_path, "decode-1", {"engine": "decode-1"})
    assert said["missing"] == {"decode-1/1.txt": "No space left on device"}
    assert sorted(p.name for p in (folder / "decode-1").iterdir()) == ["0.txt", "2.txt"]


def test_a_bundle_has_its_manifest_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is bounded all the same: the oldest make room before anything is written."""
    names = [f"20260101T000000Z-{n:06d}-decode-1" for n in range(40)]
    for name in names:
        (tmp_path / name).mkdir()
    full_after(monkeypatch, 0)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            gather.store(bundle_of(1), tmp_path, "decode-1", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == names[-gather.KEPT + 1 :]


def test_a_verdict_that_the_disk_does_not_take_costs_nothing_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = gather.store(bundle_of(1), tmp_path, "decode-1", {"engine": "decode-1"})
    before = (folder / "manifest.json").read_text()
    full_after(monkeypatch, 0)
    with pytest.raises(OSError, match="No space left"):
        gather.extend(folder, {"verdict.md": "x"}, {"verdict": "UNDETERMINED"})
    assert (folder / "manifest.json").read_text() == before
    assert sorted(p.name for p in folder.iterdir()) == ["decode-1", "manifest.json"]


def test_what_a_killed_watch_left_half_written_goes(tmp_path: Path) -> None:
    old, new = [tmp_path / f".20260101T00000{n}Z-000000-decode-1.partial" for n in range(2)]
    for partial in (old, new):
        (partial / "decode-1").mkdir(parents=True)
    os.utime(old, (1, 1))
    gather.store(bundle_of(1), tmp_path, "decode-1", {})
    assert not old.exists()
    assert new.exists(), "another watch may be writing it"


def test_old_bundles_go_and_nothing_else(tmp_path: Path) -> None:
    files = gather.Files()
    files.add("a.txt", "x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "20261129T000000Z").mkdir()
    made = [gather.store(files, tmp_path, "decode-1", {}) for _ in range(4)]
    gather.prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["mine", "20261129T000000Z", made[-1].name, made[-2].name]
    )


def test_after_a_clock_was_set_back_new_bundles_are_not_the_first_to_go(tmp_path: Path) -> None:
    files = gather.Files()
    files.add("a.txt", "x")
    ahead = [f"2099010{n}T000000Z-000000-decode-1" for n in range(1, 4)]
    for name in ahead:
        (tmp_path / name).mkdir()
    made = [gather.store(files, tmp_path, "decode-1", {}) for _ in range(2)]
    gather.prune(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([made[0].name, made[1].name, ahead[-1]])
    gather.prune(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == [made[1].name]


def test_recorder_files_of_an_earlier_life_are_not_taken(tmp_path: Path, child: "subprocess.Popen[bytes]") -> None:
    old, new = tmp_path / "nccl_trace_rank_0.json", tmp_path / "nccl_trace_rank_1.json"
    old.write_text("{}")
    new.write_text("{}")
    os.utime(old, (1, 1))
    assert incident.recorder_files(child.pid, [str(tmp_path / "engine.log")]) == [new]


def test_a_pickled_recording_is_kept_as_it_is(tmp_path: Path, child: "subprocess.Popen[bytes]") -> None:
    dump = pickle.dumps({"version": "2.9", "entries": [{"seq_id": n, "state": "\u00e9\x80"} for n in range(300)]})
    large = pickle.dumps([b"x" * gather.BINARY_BYTES])
    text = f'{{"entries": [], "prompt": "{WORDS}"}}'.encode()
    for rank, data in enumerate((dump, large, text)):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)

    async def go() -> gather.Files:
        client = Client(5.0)
        engine = msgspec.structs.replace(engine_of(child, "http://127.0.0.1:9", tmp_path / "engine.log"), url=None)
        pages = CountersSignal(client)
        keeper = Keeper(tmp_path / "bundles", client, pages, LoadsSignal(client), LogSignal(), GpuSignal())
        files = await keeper.collect([engine], None)
        await keeper.close()
        await client.close()
        return files

    files = asyncio.run(go())
    kept = files.contents
    assert kept["decode-1/nccl_trace_rank_0"] == dump
    assert "decode-1/nccl_trace_rank_1" not in kept
    assert any("nccl_trace_rank_1: left out" in note for note in files.notes)
    assert WORDS.encode() not in kept["decode-1/nccl_trace_rank_2"]
