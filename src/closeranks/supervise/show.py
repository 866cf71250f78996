"""What the children write, passed on to one place, line by line, while it also stays in their log files."""

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from closeranks.supervise.child import Child

LOOK_S = 0.25
"""Time between two looks at the logs."""
MOST = 2**20
"""Bytes passed on of one log in one look; what is behind by more than `FAR` is left to the file."""
FAR = 8 * MOST

log = structlog.get_logger()
Render = Callable[[dict[str, object]], str]
"""One line, without its end, of an event as structlog has it (`event`, `level`, `timestamp`, fields)."""


class Show:
    """Passes on new lines of `children()` to `write`. Logs are optional: one that cannot be read is said once, and
    read again as soon as it can be.

    `render` makes lines that are JSON (what a program writes when its output is a file) into the shape of the others.
    """

    def __init__(
        self, children: Callable[[], Iterable[Child]], write: Callable[[str], object], render: Render | None = None
    ) -> None:
        self._children = children
        self._write = write
        self._render = render
        self._shown: dict[Path, int] = {}
        self._unread: set[Path] = set()

    def skip(self, path: Path) -> None:
        """Do not show what a file holds already: an earlier service wrote it."""
        try:
            self._shown[path] = path.stat().st_size
        except OSError:  # none there, or it cannot be read: nothing of it will be shown twice
            self._shown[path] = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.now()
            await asyncio.sleep(LOOK_S)

    def now(self) -> None:
        """Pass on what is new."""
        children = list(self._children())
        for path in self._shown.keys() - {c.log for c in children}:  # folders of epochs long gone
            if not os.path.exists(path.parent):
                del self._shown[path]
        for child in children:
            try:
                text = self._new(child.log)
            except FileNotFoundError:
                continue
            except OSError as error:  # no descriptor left, a damaged disk, something else in its place
                if child.log not in self._unread:
                    self._unread.add(child.log)
                    log.warning("a log cannot be shown now", child=child.name, log=str(child.log), error=str(error))
                continue
            self._unread.discard(child.log)
            if text:
                self._write(self._shaped(text) if self._render else text)

    def _new(self, path: Path) -> str:
        seen = self._shown.get(path, 0)
        left_out = ""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < seen:  # it was cut back
                seen = 0
            if size - seen > FAR:
                left_out = f"[{size - seen - MOST} bytes not shown: see {path}]\n"
                seen = size - MOST
            file.seek(seen)
            text = file.read(MOST)
        end = text.rfind(b"\n") + 1
        if not end and len(text) == MOST:  # a line without an end
            end = MOST
        self._shown[path] = seen + end
        return left_out + text[:end].decode(errors="replace")

    def _shaped(self, text: str) -> str:
        assert self._render is not None
        lines = []
        for line in text.splitlines(keepends=True):
            if line.startswith("{") and line.endswith("}\n"):
                try:
                    found = json.loads(line)
                except ValueError:
                    found = None
                if isinstance(found, dict) and isinstance(found.get("event"), str):
                    line = self._render(found) + "\n"
            lines.append(line)
        return "".join(lines)
