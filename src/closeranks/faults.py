"""Named places where a running service can be made to fail, and the specs that say which, for tests and drills.

A spec is `POINT:ACTION[,key=value …]`, given to `closeranks serve --fault`; several are several faults:

    rank.forward:raise,engine=decode,rank=1,after=200     raise in the 200th forward pass of one rank
    peer.send:drop,message=Grant,times=1                  lose one message between the leaders
    transfer.start:stick,engine=prefill,seconds=30        a transfer that neither ends nor fails

`after=N` acts at the N-th time that the point is reached with the rest matching (default 1), `times=M` at M times in a
row from there (default 1; 0: always). Any other key must match what the point says of itself (engine, rank, message,
token …). Nothing here runs unless a spec is given: each part holds `None` in place of an `Injector`.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

POINTS: dict[str, dict[str, str]] = {
    "rank.forward": {
        "raise": "an exception in the forward pass",
        "loop": "an endless loop on the main thread (`seconds=` bounds it)",
        "kill": "SIGKILL of the rank",
        "stop": "SIGSTOP of the rank",
    },
    "rank.row": {"raise": "an exception when a row with `token=` among its tokens is computed (a poison request)"},
    "rank.digest": {"wrong": "the rank's digest differs from here on"},
    "rank.arrived": {"corrupt": "flip a byte of an arrived page before it is checked"},
    "transfer.start": {
        "stick": "the transfer neither ends nor fails (`seconds=` bounds it)",
        "fail": "the transfer fails",
        "late": "the transfer is reported failed and its bytes are written `seconds=` later all the same",
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

    def due(self, facts: dict[str, object]) -> bool:
        """Count one arrival at the point; whether the fault acts now."""
        if any(str(facts.get(key)) != value for key, value in self.match.items()):
            return False
        self.reached += 1
        return self.reached >= self.after and (self.times == 0 or self.reached < self.after + self.times)


def parse(spec: str) -> Fault:
    """Raises FaultSpecError."""
    head, *pairs = spec.split(",")
    point, _, action = head.partition(":")
    if point not in POINTS:
        raise FaultSpecError(f"{spec!r}: no point {point!r}; points: {', '.join(POINTS)}")
    if action not in POINTS[point]:
        raise FaultSpecError(f"{spec!r}: {point} has no action {action!r}; actions: {', '.join(POINTS[point])}")
    fault = Fault(spec, point, action, {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            if not equals:
                raise ValueError("expected key=value")
            if key in _COUNTS:
                number = int(value)
                if number < (key == "after"):
                    raise ValueError("too small")
                setattr(fault, key, number)
            elif key == "seconds":
                fault.seconds = float(value)
            else:
                fault.match[key] = value
        except ValueError as error:
            raise FaultSpecError(f"{spec!r}: {pair!r}: {error}") from error
    return fault


class Injector:
    """The faults of one process. `facts` are what is true of the whole process (engine, rank)."""

    def __init__(self, specs: Sequence[str], **facts: object) -> None:
        self._faults = [parse(spec) for spec in specs]
        self._facts = facts

    def due(self, point: str, **facts: object) -> Fault | None:
        """The first fault that acts at this arrival at `point`, if any; every matching one counts the arrival."""
        known = self._facts | facts
        acting = [fault for fault in self._faults if fault.point == point and fault.due(known)]
        return acting[0] if acting else None

    def act(self, point: str, **facts: object) -> Fault | None:
        """`due`, carrying out what needs nothing of the caller: raise, kill, stop, loop. Else the fault is returned."""
        fault = self.due(point, **facts)
        if fault is None:
            return None
        if fault.action == "raise":
            raise InjectedFault(f"injected: {fault.spec}")
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.action == "loop":
            until = time.monotonic() + fault.seconds
            while time.monotonic() < until:
                pass
        return fault


def injector(specs: Sequence[str], **facts: object) -> Injector | None:
    """None without specs, so that a part pays one `is None` for it. Raises FaultSpecError."""
    return Injector(specs, **facts) if specs else None
