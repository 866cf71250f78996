"""Snapshots made by hand: one engine of four ranks, look by look, each signal moving, standing or blind as told."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from closeranks.watch.limits import DEFAULT
from closeranks.watch.machine import Memory, step
from closeranks.watch.snapshot import Blind, EngineSeen, Kind, Proc, Role, Snapshot, State, Values
from closeranks.watch.snapshot import Signal as SignalName

Moves = Literal["moves", "stands", "blind"]
NAME = "decode-31022"
RANKS = 4


def engine(kind: Kind = "sglang", role: Role = "decode", name: str = NAME, base: int = 100) -> EngineSeen:
    """One engine with a launcher, four deciders and a detokenizer; pids from `base` on."""
    rank = "worker" if kind == "vllm" else "rank"
    procs = [Proc(base, 1, 1, "launcher", name, None, "python3")]
    procs += [Proc(base + 1 + n, 1, base, rank, name, n, f"{kind}::rank_TP{n}") for n in range(RANKS)]  # type: ignore[arg-type]
    if kind == "vllm":
        procs.append(Proc(base + 8, 1, base, "engine_core", name, None, "VLLM::EngineCore"))
    else:
        procs.append(Proc(base + 9, 1, base, "detokenizer", name, None, "sglang::detokenizer"))
    return EngineSeen(name, kind, role, f"http://127.0.0.1:{base}", tuple(procs), ("python3", "-m", "x"), world=RANKS)


class Film:
    """Makes looks one after the other. Values that move grow with each look; those that stand keep what they had."""

    def __init__(self, seen: EngineSeen | None = None) -> None:
        self.engine = seen or engine()
        self.at = 1000.0
        self.memory = Memory()
        self._ticks: dict[str, float] = {}

    @property
    def state(self) -> State:
        """The state after the last look."""
        return self.memory.states[self.engine.name]

    @property
    def phase(self) -> str:
        return self.state.phase

    def _value(self, name: str, moves: Moves) -> float:
        self._ticks[name] = self._ticks.get(name, 5.0) + (1.0 if moves == "moves" else 0.0)
        return self._ticks[name]

    def look(
        self,
        proc: Moves = "moves",
        counters: Moves = "moves",
        log: Mapping[str, Any] | None = None,
        stacks: Mapping[str, Any] | Blind | None = None,
        probe: Mapping[str, Any] | None = None,
        http: bool | None = True,
        gpu: Mapping[str, Any] | None = None,
        numbers: Mapping[str, float] | None = None,
        state: Mapping[str, str] | None = None,
        launcher: Moves = "moves",
        tokens: Moves | None = None,
        after: float = 1.0,
        disturbed: bool = False,
    ) -> str:
        """One look `after` seconds later; the phase that follows. `state`: label → process state where it is not S."""
        self.at += after
        name, found = self.engine.name, {}
        readings: dict[SignalName, dict[str, Values | Blind]] = {"proc": {}}
        for process in self.engine.procs:
            key = f"{name}/{process.label}"
            moves = launcher if process.role == "launcher" else proc
            if moves == "blind":
                readings["proc"][key] = Blind("no right")
                continue
            readings["proc"][key] = {
                "at": self.at,
                "pid": float(process.pid),
                "start": 1.0,
                "state": (state or {}).get(process.label, "S"),
                "switches": self._value(key + "s", moves),
                "ticks": self._value(key + "t", moves),
                "frozen": False,
            }
        if counters == "blind":
            readings["counters"] = {name: Blind("HTTP 404")}
        else:
            if self.engine.kind == "sglang":
                found |= {f"busy_0_{n}": self._value(f"b{n}", counters) for n in range(RANKS)}
            found["tokens"] = self._value("tokens", tokens or counters)
            found["finished"] = self._value("finished", tokens or counters)
            found |= {"running": 0.0, **(numbers or {})}
            queues = ("running", "waiting", "bootstrap", "inflight", "prealloc", "transfer")
            held = any(found.get(q, 0) > 0 for q in queues)
            readings["counters"] = {name: {**found, "held": held, "at": self.at}}
        said = {"ready": True, "ending": False, "paused": False, "updating": False, "crash": "", "thread": ""}
        readings["log"] = {
            name: Blind("no file") if log is not None and not log else {**said, **(log or {}), "at": self.at}
        }
        if http is not None:
            readings["http"] = {name: {"at": self.at, "accepts": True, "answers": http, "said": "no answer"}}
        if isinstance(stacks, Blind):
            readings["stacks"] = {name: stacks, f"{name}/launcher": stacks}
        elif stacks is not None:
            readings["stacks"] = {name: rounds(self.at, **stacks)}
            readings["stacks"][f"{name}/launcher"] = rounds(self.at, **stacks)
        if probe is not None:
            readings["probe"] = {name: {"at": self.at, "began": self.at - 5, "said": "no answer in 10 s", **probe}}
        if gpu is not None:
            readings["gpu"] = {name: {"at": self.at, **gpu}}
        shot = self.shot = Snapshot(self.at, 0.0, (self.engine,), readings, {name: float("inf")} if disturbed else {})
        self.memory = step(self.memory, shot, DEFAULT)
        return self.phase

    def looks(self, number: int, **how: Any) -> list[str]:
        """Several alike; the phases."""
        return [self.look(**how) for _ in range(number)]


def rounds(at: float, **values: Any) -> Values:
    """A reading of two rounds of dumps that began 5 s before."""
    plain = {
        "same": True,
        "still": True,
        "seconds": 3.7,
        "idle": False,
        "startup": False,
        "updating": False,
        "slow": False,
    }
    return {
        **plain,
        "began": at - 5,
        "at": at,
        "places": "all in all_reduce",
        "lacks": "",
        "transfer_still": False,
        **values,
    }


def signals(state: State) -> set[str]:
    """The signals that a state rests on."""
    return {evidence.signal for evidence in state.why}


def run(film: Film, script: Iterable[Mapping[str, Any]]) -> list[State]:
    """The states after each look of a script."""
    states = []
    for how in script:
        film.look(**how)
        states.append(film.state)
    return states
