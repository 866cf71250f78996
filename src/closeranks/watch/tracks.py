"""How long each value has stood: the memory that turns single readings into "no context switch for 4 s".

A track is a value, since when it has it, and by how many readings that is known. Durations are between readings, never
up to now: a reading that failed proves nothing. A change under a stack dump may be the dump's own: it ends no
stillness, and its time counts as none. A pause of the watch itself (it was stopped, it got no CPU, the machine slept)
counts as one second: nobody looked, and the engines may have been held as well.
"""

from collections.abc import Mapping

import msgspec

from closeranks.watch.snapshot import Blind, Snapshot, Value

Key = tuple[str, str, str]
"""Signal, key of the reading, field."""
PAUSE_S = 4.0
"""A longer time between two looks is a pause of the watch."""
PAUSE_COUNTS_S = 1.0
AFTER_DUMP_S = 0.3
"""For so long after a dump its own switches go on."""
KEPT_S = 120.0
_NOT_TRACKED = frozenset({"at", "began", "pid", "seconds", "places", "said", "wchan"})


class Track(msgspec.Struct, frozen=True):
    """One value. Times are monotonic seconds of readings."""

    value: Value
    changed: float
    """Of the first reading that showed it."""
    last: float
    """Of the newest reading that showed it."""
    first: float
    """Of the first reading of this field in this life."""
    looks: int = 1
    """Readings that showed it."""
    masked: float = 0.0
    """Seconds since `changed` in which a dump hid whether it stood: they are no part of `flat_s`."""

    @property
    def flat_s(self) -> float:
        """Seconds between the first and the newest of at least three readings that showed the value."""
        return self.last - self.changed - self.masked if self.looks >= 3 else 0.0

    @property
    def moved(self) -> bool:
        """Whether it has ever been seen to change."""
        return self.changed > self.first


def advance(tracks: Mapping[Key, Track], snapshot: Snapshot, before: float | None) -> dict[Key, Track]:
    """The tracks after one more look. `before`: time of the look before it, None for the first."""
    gap = snapshot.at - before if before is not None else 0.0
    paused = not 0 <= gap <= PAUSE_S
    slip = gap - PAUSE_COUNTS_S
    now: dict[Key, Track] = {}
    for signal, readings in snapshot.readings.items():
        for key, values in readings.items():
            if isinstance(values, Blind):
                continue
            at = float(values.get("at", snapshot.at))
            start = tracks.get((signal, key, "start"))
            reborn = start is not None and start.value != values.get("start", start.value)
            dumped = snapshot.disturbed.get(key.partition("/")[0], float("-inf")) if signal == "proc" else float("-inf")
            for field, value in values.items():
                if field in _NOT_TRACKED:
                    continue
                place: Key = (signal, key, field)
                old = None if reborn else tracks.get(place)
                if old is not None and paused:
                    old = _later(old, slip)
                now[place] = _next(old, value, at, old is not None and old.last < dumped + AFTER_DUMP_S)
    for place, old in tracks.items():  # no reading this time: it is kept as it was
        if place not in now and snapshot.at - old.last < KEPT_S:
            now[place] = _later(old, slip) if paused else old
    return now


def _later(track: Track, seconds: float) -> Track:
    """The track as if so many seconds had not been."""
    return msgspec.structs.replace(
        track, changed=track.changed + seconds, last=track.last + seconds, first=track.first + seconds
    )


def _next(old: Track | None, value: Value, at: float, masked: bool) -> Track:
    if old is None:
        return Track(value, at, at, at)
    if at <= old.last:  # the same reading as at the last look
        return old
    if value == old.value:
        return msgspec.structs.replace(old, last=at, looks=old.looks + 1)
    if masked and isinstance(value, float):  # the dump's own doing, or not: nobody can tell
        return msgspec.structs.replace(old, value=value, last=at, masked=old.masked + at - old.last)
    return Track(value, at, at, old.first)
