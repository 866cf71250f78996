"""Server-sent events as bytes: cut a stream into events, read an event's data, replace it.

Nothing here alters a byte on its own: the events that `EventSplitter` returns, joined, are the stream that was fed
(property-tested), so a proxy that forwards them unchanged is transparent. Source of the rules: WHATWG HTML, 9.2.6
(line ends CR LF, LF or CR; an event ends at an empty line; several `data` lines are joined by LF; `:` is a comment).
"""

import re

# An end of line is CR LF, LF, or a CR that no LF follows. Two of them in a row end an event. A CR at the very end of
# what has arrived counts as an end of line: should its LF still come, it leads the next event and is ignored there.
_END_OF_EVENT = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")


class Fragment(bytes):
    """A piece of an event that was larger than the limit: to be forwarded as it is, never to be read."""

    __slots__ = ()


class EventSplitter:
    """Cuts a stream, given in any pieces, into whole events in time linear in its length.

    An event larger than `limit` bytes is not kept: its pieces come out at once as `Fragment`s, until it ends.
    """

    __slots__ = ("_buffer", "_limit", "_scanned", "_skipping")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._scanned = 0
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each with the empty line that ends it."""
        if not self._buffer and not self._skipping and _is_one_event(data) and len(data) <= self._limit:
            return [data]
        buffer = self._buffer
        buffer += data
        events: list[bytes] = []
        start = 0
        # An end of event may straddle the border to what was scanned before: at most three bytes of it.
        for match in _END_OF_EVENT.finditer(buffer, max(0, self._scanned - 3)):
            events.append(self._event(bytes(buffer[start : match.end()])))
            start = match.end()
        if start:
            del buffer[:start]
        self._scanned = len(buffer)
        if self._skipping or len(buffer) > self._limit:
            # Keep the last three bytes, lest an empty line that is not here in full yet be missed.
            cut = max(0, len(buffer) - 3)
            if cut:
                events.append(Fragment(buffer[:cut]))
                del buffer[:cut]
            self._scanned = 0
            self._skipping = True
        return events

    def _event(self, raw: bytes) -> bytes:
        if self._skipping or len(raw) > self._limit:
            self._skipping = False
            return Fragment(raw)
        return raw

    @property
    def held(self) -> int:
        """Bytes of an event that has not ended yet."""
        return len(self._buffer)

    @property
    def rest(self) -> bytes:
        """What has come of an event that has not ended yet."""
        return bytes(self._buffer)

    def close(self) -> bytes:
        """What was left without an empty line after it (a stream may end like that), as a `Fragment` if it was cut."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._scanned = 0
        return Fragment(rest) if self._skipping else rest


def _is_one_event(data: bytes) -> bool:
    """Whether `data` is one event in the form that nearly every server writes: one line and an empty one, LF."""
    return data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2 and b"\r" not in data


def data_of(event: bytes) -> bytes | None:
    """The data of an event, its `data` lines joined by LF; None where it has none (a comment, a bare field)."""
    if event.startswith(b"data: ") and _is_one_event(event):
        return event[6:-2]
    parts = []
    for line in _END_OF_LINE.split(event.removeprefix(b"\xef\xbb\xbf")):
        if line.startswith(b"data:"):
            parts.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            parts.append(b"")
    return b"\n".join(parts) if parts else None


def with_data(event: bytes, data: bytes) -> bytes:
    """`event` with its data replaced by the single line `data`; its other fields and comments stay, data goes last."""
    if event.startswith(b"data: ") and _is_one_event(event):
        return b"data: " + data + b"\n\n"
    eol = _END_OF_LINE.search(event.lstrip(b"\r\n"))
    end = eol.group() if eol else b"\n"
    others = [
        line
        for line in _END_OF_LINE.split(event.removeprefix(b"\xef\xbb\xbf"))
        if line and line != b"data" and not line.startswith(b"data:")
    ]
    return end.join([*others, b"data: " + data, b"", b""])


def new_event(data: bytes) -> bytes:
    """A new event that holds one line of data."""
    return b"data: " + data + b"\n\n"
