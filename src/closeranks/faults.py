"""Named places where a running service can be made to fail, and the specs that say which, for tests and drills.

A spec is `POINT:ACTION[,key=value …]`, given to `closeranks serve --fault`; several are several faults:

    rank.forward:raise,engine=decode,rank=1,after=200     raise in the 200th forward pass of one rank
    peer.send:drop,message=Grant,times=1                  lose one message between the leaders
    transfer.start:stick,engine=prefill,seconds=30        a transfer that neither ends nor fails

`after=N` acts from the N-th time on that a process reaches the point with the rest matching (default 1), `times=M` at
M arrivals (default 1; 0: always). Any other key must match what the point says of itself (engine, rank, message, …);
a key that the point never says, and a value that it cannot have in this service, are errors. Nothing here runs unless
a spec is given: each part holds `None` in place of an `Injector`.

What acted is written to a *record*, one JSON line each, before it acts. Whoever takes a process's place reads it: a
fault is spent once, not once in each epoch, and an incident can say that it was a drill.
"""

import ipaddress
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

POINTS: dict[str, dict[str, str]] = {
    "rank.forward": {
        "raise": "an exception in the forward pass",
        "loop": "an endless loop on the main thread (`seconds=` bounds it)",
        "crash": "SIGSEGV of the rank, as a native library would",
        "kill": "SIGKILL of the rank",
        "stop": "SIGSTOP of the rank",
    },
    "rank.row": {
        "raise": "an exception when a row with `token=` among its tokens is computed (a poison request)",
        "crash": "SIGSEGV at such a row",
    },
    "rank.digest": {"wrong": "the rank's digest differs from here on"},
    "rank.arrived": {"corrupt": "flip a byte of an arrived page before it is checked"},
    "transfer.start": {
        "stick": "the transfer neither ends nor fails (`seconds=` bounds it)",
        "fail": "the transfer fails",
        "late": "it is reported failed at once, and its bytes are written all the same, `seconds=` later",
    },
    "peer.send": {
        "drop": "a message between the leaders is lost",
        "double": "it is sent twice",
        "delay": "it is sent `seconds=` later, so after its successors",
    },
    "leader.step": {"kill": "SIGKILL of the leader", "stop": "SIGSTOP of the leader", "raise": "an exception in it"},
    "leader.log": {"full": "the step log's disk is full"},
    "gateway.request": {"kill": "SIGKILL of the gateway"},
}
KEYS: dict[str, tuple[str, ...]] = {
    "rank.forward": ("engine", "role", "epoch", "rank", "n"),
    "rank.row": ("engine", "role", "epoch", "rank", "token"),
    "rank.digest": ("engine", "role", "epoch", "rank", "n"),
    "rank.arrived": ("engine", "role", "epoch", "rank", "room"),
    "transfer.start": ("engine", "role", "epoch", "rank", "room", "transfer"),
    "peer.send": ("engine", "role", "epoch", "message"),
    "leader.step": ("engine", "role", "epoch", "n"),
    "leader.log": ("engine", "role", "epoch"),
    "gateway.request": ("rid",),
}
"""What a spec may ask of each point."""
NEEDED: dict[str, tuple[str, ...]] = {"rank.row": ("token",)}
"""What a spec must ask of a point."""
_NUMBERS = frozenset({"epoch", "rank", "n", "token", "transfer"})
_WORDS: dict[str, tuple[str, ...]] = {
    "engine": ("prefill", "decode", "both"),
    "role": ("prefill", "decode", "both"),
    "message": ("Hello", "Grant", "Arrived", "End", "Quiet", "Beat"),
}
RECORD = "drill.jsonl"
"""Name of the record in the run folder."""
_COUNTS = ("after", "times")


class FaultSpecError(ValueError):
    """A spec names no point, no action of its point, or has a bad value; the text lists what there is."""


class InjectedFault(RuntimeError):
    """What `raise` raises; carries the spec, so that an incident says that it was a drill."""


@dataclass(slots=True)
class Fault:
    """One parsed spec and how often its point was reached."""

    spec: str
    point: str
    action: str
    match: dict[str, str]
    after: int = 1
    times: int = 1
    seconds: float = 3600.0
    reached: int = field(default=0, init=False)
    acted: int = field(default=0, init=False)

    def due(self, facts: dict[str, object]) -> bool:
        """Count one arrival at the point; whether the fault acts now."""
        if any(str(facts.get(key)) != value for key, value in self.match.items()):
            return False
        self.reached += 1
        return self.reached >= self.after and (self.times == 0 or self.acted < self.times)


def parse(spec: str) -> Fault:
    """Raises FaultSpecError."""
    head, *pairs = spec.split(",")
    point, _, action = head.partition(":")
    if point not in POINTS:
        raise FaultSpecError(f"{spec!r}: no point {point!r}; points: {', '.join(POINTS)}")
    if action not in POINTS[point]:
        raise FaultSpecError(f"{spec!r}: {point} has no action {action!r}; actions: {', '.join(POINTS[point])}")
    fault = Fault(spec, point, action, {})
    given = set()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            if not equals:
                raise ValueError("expected key=value")
            if key in given:
                raise ValueError("given twice")
            given.add(key)
            if key in _COUNTS:
                number = int(value)
                if number < (key == "after"):
                    raise ValueError("too small")
                setattr(fault, key, number)
            elif key == "seconds":
                fault.seconds = float(value)
                if not 0 <= fault.seconds < math.inf:
                    raise ValueError("expected seconds, 0 or more")
            elif key in KEYS[point]:
                fault.match[key] = _checked(key, value)
            else:
                raise ValueError(f"{point} knows {', '.join((*KEYS[point], *_COUNTS, 'seconds'))}")
        except ValueError as error:
            raise FaultSpecError(f"{spec!r}: {pair!r}: {error}") from error
    missing = [key for key in NEEDED.get(point, ()) if key not in given]
    if missing:
        raise FaultSpecError(f"{spec!r}: {point} needs {', '.join(f'{key}=' for key in missing)}")
    return fault


def _checked(key: str, value: str) -> str:
    """A value as the point says it. Raises ValueError for one that no point ever says."""
    if key in _NUMBERS:
        if not value.isascii() or not value.isdecimal():
            raise ValueError("expected a number, 0 or more")
        return str(int(value))
    if value not in _WORDS.get(key, (value,)):
        raise ValueError(f"expected one of {', '.join(_WORDS[key])}")
    return value


class Injector:
    """The faults of one process. `facts` are what is true of the whole process (engine, rank).

    `record`: file that outlives the process; what it says to have acted in a process with the same facts (but for the
    epoch) is spent.
    """

    def __init__(self, specs: Sequence[str], record: Path | None = None, **facts: object) -> None:
        self._faults = [parse(spec) for spec in specs]
        self._facts = facts
        self._record = record
        self._who = {key: str(value) for key, value in facts.items() if key != "epoch"}
        past = [entry["spec"] for entry in read_record(record) if entry.get("who") == self._who] if record else []
        for fault in self._faults:
            fault.acted = past.count(fault.spec)

    def due(self, point: str, **facts: object) -> Fault | None:
        """The first fault that acts at this arrival at `point`, if any; every matching one counts the arrival."""
        known = self._facts | facts
        acting = [fault for fault in self._faults if fault.point == point and fault.due(known)]
        if not acting:
            return None
        fault = acting[0]
        if self._record is not None and (fault.times or not fault.acted):
            entry = {"time": time.time(), "spec": fault.spec, "who": self._who, "pid": os.getpid()}
            try:
                with self._record.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:  # a full disk may be part of the drill
                print(f"drill: {fault.spec} could not be recorded: {error}", file=sys.stderr)
        fault.acted += 1
        return fault

    def act(self, point: str, **facts: object) -> Fault | None:
        """`due`, carrying out what needs nothing of the caller (raise, kill, …); any other fault is returned."""
        fault = self.due(point, **facts)
        if fault is None:
            return None
        if fault.action == "raise":
            raise InjectedFault(f"injected: {fault.spec}")
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.action == "loop":
            until = time.monotonic() + fault.seconds
            while time.monotonic() < until:
                pass
        return fault


def injector(specs: Sequence[str], record: Path | None = None, **facts: object) -> Injector | None:
    """None without specs, so that a part pays one `is None` for it. Raises FaultSpecError."""
    return Injector(specs, record, **facts) if specs else None


def read_record(path: Path) -> list[dict[str, object]]:
    """What acted so far, oldest first. A line cut by the end of its writer is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "spec" in entry:
            found.append(entry)
    return found


def admit(
    specs: Sequence[str], addresses: Iterable[str], allowed: bool, ranks: Mapping[str, int], gateway: bool
) -> None:
    """Check specs before anything starts.

    `addresses` are hosts and endpoints that the service binds; faults behind one that other hosts can reach need
    `allowed`, a second word of the operator. `ranks`: how many each engine of this service has, by its role; `gateway`:
    whether it has one. Raises FaultSpecError, also for a spec that could never act here.
    """
    for number, spec in enumerate(specs):
        if spec in specs[:number]:
            raise FaultSpecError(f"{spec!r} is given twice: say times=2")
        fault = parse(spec)
        if fault.point.startswith("gateway."):
            if not gateway:
                raise FaultSpecError(f"{spec!r}: this service has no gateway")
            continue
        roles = [fault.match[key] for key in ("engine", "role") if key in fault.match]
        engines = [name for name in ranks if all(role == name for role in roles)]
        if not engines:
            raise FaultSpecError(f"{spec!r}: no such engine in this service, which has {', '.join(ranks) or 'none'}")
        most = max(ranks[name] for name in engines)
        if int(fault.match.get("rank", 0)) >= most:
            raise FaultSpecError(f"{spec!r}: {' and '.join(engines)} have ranks 0 to {most - 1}")
    if not specs or allowed:
        return
    for address in addresses:
        if not _stays_here(address):
            raise FaultSpecError(f"--fault on {address}, which other hosts can reach, needs --allow-faults as well")


def _stays_here(address: str) -> bool:
    if address.startswith("ipc://"):
        return True
    host = urlsplit(address).hostname or "" if "://" in address else address.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything
