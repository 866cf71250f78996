"""An incident folder of an engine's own processes, written before they are ended (evidence before action)."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from closeranks.evidence import capture
from closeranks.supervise.child import Child

T = TypeVar("T")
KEPT = 20
"""Incident folders kept per engine; the oldest go first."""
PATIENCE_S = 15.0
"""Evidence that takes longer, on a disk that hangs, is done without."""


async def write(
    parent: Path,
    reason: str,
    children: Sequence[Child],
    facts: dict[str, object],
    extra: Sequence[Path],
    whole: Sequence[Path] = (),
) -> Path:
    """Stacks and /proc of all children that still exist, their log tails, tails of `extra` files, and `whole` ones.

    Bounded: each py-spy has its own time-out and all run at once (a few seconds at worst), each tail its size, and all
    of it `PATIENCE_S`; the oldest folders go first, so their number is bounded also where writing fails. What a full
    disk does not take is named in the manifest (`missing`). Returns the folder. Raises OSError when not even the
    manifest can be written, and no folder is left then, or when it takes too long: the caller goes on with recovery.
    """
    try:
        return await asyncio.wait_for(_write(parent, reason, children, facts, extra, whole), PATIENCE_S)
    except TimeoutError:
        raise TimeoutError(f"not done after {PATIENCE_S:g} s: the disk hangs") from None


async def _write(
    parent: Path,
    reason: str,
    children: Sequence[Child],
    facts: dict[str, object],
    extra: Sequence[Path],
    whole: Sequence[Path],
) -> Path:
    folder = await _aside(partial(_new_folder, parent))
    alive = [child for child in children if child.exit_code is None]
    for child in alive:
        capture.ask_for_stacks(child.pid)  # into its own file, one of `extra`: for where py-spy may not read
    stacks = await asyncio.gather(*(_stacks(child.pid) for child in alive))
    found: dict[str, bytes | Callable[[], bytes]] = {}
    for child, text in zip(alive, stacks, strict=True):
        found[f"{child.name}.stacks.txt"] = text.encode(errors="replace")
        found[f"{child.name}.proc.txt"] = partial(_proc, child.pid)
    for child in children:
        found[f"{child.name}.log"] = partial(capture.tail, child.log)
    found |= {path.name: partial(capture.tail, path) for path in extra}
    found |= {path.name: path.read_bytes for path in whole}
    missing = await _aside(partial(capture.write_files, folder, found))
    exits = {child.name: child.exit_code for child in children}
    pids = {child.name: child.pid for child in children}
    said = {"reason": reason, "pids": pids, "exit_codes": exits, **facts, **({"missing": missing} if missing else {})}
    try:
        await _aside(partial(capture.write_manifest, folder, said))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _new_folder(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    capture.keep_newest(parent, KEPT - 1)
    folder = parent / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{time.time_ns() % 10**6:06d}"
    folder.mkdir()
    return folder


async def _stacks(pid: int) -> str:
    try:
        return await capture.stacks(pid)
    except RuntimeError as error:  # no thread to be had, which asyncio may take to wait for py-spy
        return f"no stacks: {error}\n"


async def _aside(work: Callable[[], T]) -> T:
    """Do it in a thread, so that signals and other engines are not held by a slow disk; here, where there is none."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    result: list[T | BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            result.append(error)
        if not loop.is_closed():  # nobody waits any more for what took so long
            loop.call_soon_threadsafe(done.set)

    try:
        threading.Thread(target=run, name="incident", daemon=True).start()
    except RuntimeError:  # can't start new thread
        return work()
    await done.wait()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _proc(pid: int) -> bytes:
    return capture.proc(pid).encode(errors="replace")


def fault_of(path: Path) -> dict[str, object]:
    """What the leader wrote about its fault before it left; empty if it wrote nothing (killed, crashed)."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
