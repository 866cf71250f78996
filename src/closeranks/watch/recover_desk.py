"""Recovery's own folder (mode 0700), used beside the loop: `journal`, `lock`, `STOP`, and how engines are started.

Every call on it runs in one thread, in order, and is waited for `DISK_S`: a disk that hangs must not stand the watch
still. A call that is given up comes to its end some time; the lock is held and the journal is open until then.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from closeranks.watch.aside import Aside
from closeranks.watch.patience import within
from closeranks.watch.recover_journal import Entry, Journal, read
from closeranks.watch.recover_steps import Facts

T = TypeVar("T")
DISK_S = 20.0
"""A call that takes longer has failed: a loaded disk flushes within seconds."""


class DeskFailed(OSError):
    """Whether an operator wants a stop could not be read. No TimeoutError, and no failure of a step that asks."""


class Desk:
    """The folder. Calls raise OSError, also when the disk does not answer in time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop_file = folder, folder / "STOP"
        self._aside = Aside("recovery")
        self._closing: set[asyncio.Task[None]] = set()

    async def stopped(self) -> bool:
        """Whether an operator wants no step to begin. Raises DeskFailed."""
        try:
            return await self._do(self.stop_file.exists)
        except OSError as error:
            raise DeskFailed(error.errno, error.strerror, str(self.stop_file)) from error

    async def stop_says(self) -> str:
        """That, and who said so, in words."""
        try:
            who = (await self._do(lambda: self.stop_file.read_text(errors="replace"))).strip()[:200]
        except OSError:
            who = ""
        return f"stopped by an operator ({self.stop_file})" + (f": {who}" if who else "")

    async def read(self) -> list[Entry]:
        """The journal, without the lock. Raises JournalDamaged."""
        return await self._do(lambda: read(self.folder / "journal"))

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator["Held"]:
        """Under the lock of this service. Raises BlockingIOError when another process holds it, JournalDamaged."""
        held = Held(self.folder, self._do)
        try:
            await self._do(held.open)
            yield held
        finally:
            closing = asyncio.create_task(self._aside.run(held.close))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            if await within(closing, DISK_S):  # else when the call before has come back
                await closing

    async def keep(self, name: str, facts: Facts) -> None:
        """What the plan of that name needs, until `forget`. It holds secrets: what is left of plans before it goes, and
        so does its own where it could not be written whole. Under the lock, while no plan is open."""
        # The standard encoder: a variable of an environment need not be UTF-8, and must come back as it was.
        data = json.dumps(msgspec.to_builtins(facts)).encode()

        def write() -> None:
            path = self._facts_file(name)
            for old in self.folder.glob("*.facts"):
                old.unlink()
            try:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                path.unlink(missing_ok=True)
                raise

        await self._do(write)

    async def kept(self, name: str) -> Facts:
        """The same again. Raises ValueError where it is no such thing any more."""
        return msgspec.convert(json.loads(await self._do(self._facts_file(name).read_bytes)), Facts)

    async def forget(self, name: str) -> None:
        """It holds secrets: gone with the end of the plan."""
        await self._do(lambda: self._facts_file(name).unlink(missing_ok=True))

    def _facts_file(self, name: str) -> Path:
        return self.folder / f"{name}.facts"

    async def _do(self, what: Callable[[], T]) -> T:
        call = asyncio.create_task(self._aside.run(what))
        try:
            if not await within(call, DISK_S):
                raise OSError(errno.ETIMEDOUT, f"the disk did not answer within {DISK_S:.0f} s", str(self.folder))
            return await call
        finally:
            call.cancel()


class Held:
    """The lock and the journal, while they are ours."""

    def __init__(self, folder: Path, do: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._folder, self._do = folder, do
        self._journal, self._lock = Journal(folder / "journal"), -1

    @property
    def entries(self) -> list[Entry]:
        return self._journal.entries

    async def append(self, entry: Entry) -> None:
        """On disk when this returns."""
        await self._do(lambda: self._journal.append(entry))

    def open(self) -> None:
        """Blocking, as `close` is: for the desk."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._journal.open()

    def close(self) -> None:
        self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
