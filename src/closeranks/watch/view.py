"""One engine in one look, with what its values did before: the questions that rules ask."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from closeranks.watch.snapshot import Blind, EngineSeen, Proc, Signal, Snapshot, State, Values
from closeranks.watch.tracks import Key, Track

FRESH_S = 12.0
"""An older reading says nothing about now."""
OVER_HTTP = frozenset({"counters", "loads", "http", "probe"})
"""Signals whose readings do not tell of which process they are."""


@dataclass(frozen=True)
class View:
    """`states` are those of the look before, of all engines."""

    engine: EngineSeen
    snapshot: Snapshot
    tracks: Mapping[Key, Track]
    states: Mapping[str, State]
    served: bool = False
    """It was ready in this life."""
    anew: bool = False
    """A life of this engine went before this one while we watched."""
    born: float = float("-inf")
    """When its processes were first seen in the place of others: what was read before is of those."""

    def values(self, signal: Signal, key: str = "") -> Values | None:
        """The reading, None when it is blind, old, of a life of the engine that is over, or not there."""
        found = self.snapshot.readings.get(signal, {}).get(key or self.engine.name)
        if found is None or isinstance(found, Blind):
            return None
        if signal in OVER_HTTP and float(found.get("at", self.born)) < self.born:
            return None
        head = self.engine.head if signal == "log" and "pid" in found else None
        if head is not None and (head.pid, head.start_time) != (found["pid"], found["start"]):
            return None
        return found if self.snapshot.at - float(found.get("at", self.snapshot.at)) <= FRESH_S else None

    def number(self, signal: Signal, field: str) -> float | None:
        """A number of the engine's reading."""
        values = self.values(signal)
        value = values.get(field) if values is not None else None
        return float(value) if isinstance(value, float | int) else None

    def text(self, signal: Signal, field: str, key: str = "") -> str:
        """A text of a reading, empty without one."""
        values = self.values(signal, key)
        return str(values.get(field, "")) if values is not None else ""

    def says(self, signal: Signal, field: str, key: str = "") -> bool:
        """Whether a flag of a reading is set."""
        values = self.values(signal, key)
        return values is not None and values.get(field) is True

    def track(self, signal: Signal, field: str, key: str = "") -> Track | None:
        """What a value did; None unless its newest reading is fresh."""
        found = self.tracks.get((signal, key or self.engine.name, field))
        if found is None or (signal in OVER_HTTP and found.last < self.born):
            return None
        return found if self.snapshot.at - found.last <= FRESH_S else None

    def flat_s(self, signal: Signal, field: str, key: str = "") -> float:
        """For how long a value has stood; 0 when nothing is known of it."""
        found = self.track(signal, field, key)
        return found.flat_s if found is not None else 0.0

    def proc(self, process: Proc) -> Values | None:
        """The /proc reading of one process."""
        return self.values("proc", f"{self.engine.name}/{process.label}")

    def proc_track(self, process: Proc, field: str) -> Track | None:
        return self.track("proc", field, f"{self.engine.name}/{process.label}")

    def busy(self) -> list[Track]:
        """The ranks' stage seconds (SGLang), which every turn of a loop makes grow."""
        return self._busy

    @cached_property
    def _busy(self) -> list[Track]:
        return [
            track
            for (signal, key, field), track in self.tracks.items()
            if signal == "counters" and key == self.engine.name and field.startswith("busy_")
            if self.snapshot.at - track.last <= FRESH_S and track.last >= self.born
        ]

    def peers(self) -> Iterator["View"]:
        """The other engines that this one may hand requests to or get them from."""
        for other in self.snapshot.engines:
            pair = {other.role, self.engine.role} == {"prefill", "decode"}
            one_service = self.engine.kind != "closeranks" or other.url == self.engine.url
            if pair and one_service and other.kind == self.engine.kind:
                yield View(other, self.snapshot, self.tracks, self.states)

    def blind(self) -> tuple[str, ...]:
        """Signals that give nothing for this engine, with the reason."""
        found = []
        for signal, readings in sorted(self.snapshot.readings.items()):
            own = [v for k, v in readings.items() if k.partition("/")[0] == self.engine.name]
            reasons = [v.reason for v in own if isinstance(v, Blind)]
            if own and len(reasons) == len(own):
                found.append(f"{signal}: {reasons[0]}")
        return tuple(found)
