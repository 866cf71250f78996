"""An incident folder of an engine's own processes, written before they are ended (evidence before action)."""

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from closeranks.evidence import capture
from closeranks.supervise.child import Child

KEPT = 20
"""Incident folders kept per engine; the oldest go first."""


def _new_folder(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{time.time_ns() % 10**6:06d}"
    folder.mkdir()
    return folder


async def write(
    parent: Path,
    reason: str,
    children: Sequence[Child],
    facts: dict[str, object],
    extra: Sequence[Path],
    whole: Sequence[Path] = (),
) -> Path:
    """Stacks and /proc of all children that still exist, their log tails, tails of `extra` files, and `whole` ones.

    Bounded: each py-spy has its own time-out and all run at once (a few seconds at worst), each tail its size.
    Returns the folder. Raises OSError when the disk takes nothing at all; the caller goes on with recovery.
    """
    folder = _new_folder(parent)
    alive = [child for child in children if child.exit_code is None]
    for child in alive:
        capture.ask_for_stacks(child.pid)  # into its own file, one of `extra`: for where py-spy may not read
    stacks = await asyncio.gather(*(capture.stacks(child.pid) for child in alive))
    for child, text in zip(alive, stacks, strict=True):
        (folder / f"{child.name}.stacks.txt").write_text(text)
        (folder / f"{child.name}.proc.txt").write_text(capture.proc(child.pid))
    for child in children:
        (folder / f"{child.name}.log").write_bytes(capture.tail(child.log))
    for path in extra:
        (folder / path.name).write_bytes(capture.tail(path))
    for path in whole:
        await asyncio.to_thread(shutil.copyfile, path, folder / path.name)
    exits = {child.name: child.exit_code for child in children}
    pids = {child.name: child.pid for child in children}
    capture.write_manifest(folder, {"reason": reason, "pids": pids, "exit_codes": exits, **facts})
    capture.keep_newest(parent, KEPT)
    return folder


def fault_of(path: Path) -> dict[str, object]:
    """What the leader wrote about its fault before it left; empty if it wrote nothing (killed, crashed)."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
