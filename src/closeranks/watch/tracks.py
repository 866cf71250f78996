"""How long each value has stood: the memory that turns single readings into "no context switch for 4 s".

A track is a value, since when it has it, and by how many readings that is known. Durations are between readings, never
up to now: a reading that failed proves nothing. After a pause of the watch itself (it was stopped, the machine slept)
all durations begin anew.
"""

from collections.abc import Mapping

import msgspec

from closeranks.watch.snapshot import Blind, Snapshot, Value

Key = tuple[str, str, str]
"""Signal, key of the reading, field."""
PAUSE_S = 6.0
"""A longer time between two looks is a pause of the watch."""
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

    @property
    def flat_s(self) -> float:
        """Seconds between the first and the newest of at least three readings that showed the value."""
        return self.last - self.changed if self.looks >= 3 else 0.0

    @property
    def moved(self) -> bool:
        """Whether it has ever been seen to change."""
        return self.changed > self.first


def advance(tracks: Mapping[Key, Track], snapshot: Snapshot, before: float | None) -> dict[Key, Track]:
    """The tracks after one more look. `before`: time of the look before it, None for the first."""
    paused = before is not None and not 0 <= snapshot.at - before <= PAUSE_S
    now: dict[Key, Track] = {}
    for signal, readings in snapshot.readings.items():
        for key, values in readings.items():
            if isinstance(values, Blind):
                continue
            at = float(values.get("at", snapshot.at))
            start = tracks.get((signal, key, "start"))
            reborn = start is not None and start.value != values.get("start", start.value)
            masked = signal == "proc" and key.partition("/")[0] in snapshot.disturbed
            for field, value in values.items():
                if field in _NOT_TRACKED:
                    continue
                place: Key = (signal, key, field)
                old = None if reborn or paused else tracks.get(place)
                now[place] = _next(old, value, at, masked)
    for place, old in tracks.items():  # no reading this time: it is kept as it was
        if place not in now and not paused and snapshot.at - old.last < 120:
            now[place] = old
    return now


def _next(old: Track | None, value: Value, at: float, masked: bool) -> Track:
    if old is None:
        return Track(value, at, at, at)
    if at <= old.last:  # the same reading as at the last look
        return old
    if value == old.value:
        return Track(value, old.changed, at, old.first, old.looks + 1)
    if masked and isinstance(value, float):  # the dump's own doing, as far as anybody can tell
        return Track(value, old.changed, at, old.first, old.looks)
    return Track(value, at, at, old.first)
