"""What has passed: events after which the engine that they concern went on making tokens, or began a new life."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from closeranks.diagnose.facts import Event, Fact
from closeranks.diagnose.scene.progress import GRACE_S, Progress

FEW = 2  # lines of tokens that are no step which was under way
STEP_S = 300.0  # so long after an event one line is enough: a step that was under way has ended
UNCLOCKED = 3  # of them, where no clock tells for how long
MINUTE = 60.0


@dataclass(frozen=True)
class Sequel:
    """What followed an event: the last line of tokens, and for how many seconds at least they had flowed by then."""

    last: Event
    span: float
    reborn: bool = False  # the engine had come up anew in between
    intake: bool = False  # these are tokens that prefill took in, and no log of decode is in the bundle


@dataclass
class _View:
    """Lines about batches in one order: what comes after a place in it is found without going through them all."""

    places: list[float]
    lines: list[Event]
    _made: list[int] = field(init=False)  # how many of the lines before each show tokens
    _last: Event | None = field(init=False)  # the last of those
    _busy: int = field(init=False)  # the last line that does not say that there was nothing to do

    def __post_init__(self) -> None:
        self._made = [0, *accumulate(int(_tokens(b)) for b in self.lines)]
        self._last = next((b for b in reversed(self.lines) if _tokens(b)), None)
        self._busy = max((i for i, b in enumerate(self.lines) if not _idle(b)), default=-1)

    def after(self, place: float) -> tuple[list[Event], int, bool]:
        """The first and last line after a place (of tokens, if any), how many show tokens, whether all were idle."""
        start = bisect_right(self.places, place)
        if start == len(self.lines):
            return [], 0, False
        made = self._made[-1] - self._made[start]
        return [self.lines[start], self._last if made and self._last else self.lines[-1]], made, self._busy < start


class _Log:
    """The lines about batches that one engine wrote into one file."""

    def __init__(self, lines: list[Event]) -> None:
        timed = sorted(((b.time, b) for b in lines if b.time is not None), key=lambda x: (x[0], x[1].src))
        self.by_clock = _View([t for t, _ in timed], [b for _, b in timed])
        in_order = sorted(lines, key=lambda b: b.src)
        self.by_line = _View([b.src.line for b in in_order], in_order)
        self.file = lines[0].src.file

    def after(self, f: Fact) -> tuple[list[Event], int, bool]:
        """What follows `f` by the clock, else by order in one file."""
        if f.time is not None and self.by_clock.places:
            return self.by_clock.after(f.time + GRACE_S)
        return self.by_line.after(f.src.line) if self.file == f.src.file else ([], 0, False)


@dataclass
class Past(Progress):
    """What followed the events of a bundle."""

    def sequel(self, f: Fact, of_all: bool = False) -> Sequel | None:
        """What shows that `f` did not stop any engine that it may concern; None if one of them may have stopped.

        It concerns the engine in whose log it stands; one from a file without tokens (the kernel's, NCCL's, a router's)
        may concern each engine in the bundle, and so does whatever is told by one engine of a pair of both (`of_all`).
        """
        side = "" if of_all else self.side(f)
        dp = f.who.dp if f.who else None  # other data-parallel ranks go on without it
        mine = {
            key: log
            for key, log in self._logs.items()
            if (not side or key[1] in ("", side)) and (None in (dp, key[2]) or dp == key[2])
        }
        if not of_all:
            own = {key: log for key, log in mine.items() if key[0] == f.src.file}
            later = {k: mine[k] for key in own for k in self._next_to(key) if k in mine and _folder(k) == _folder(key)}
            mine = own | later or mine
        found: list[tuple[Event, float]] = []
        for key, log in mine.items():
            ends, made, idle = log.after(f)
            if idle or (not ends and self._next_to(key)):
                continue
            if not made:
                return None
            began = f.time if f.time is not None else ends[0].time
            span = ends[1].time - began if began is not None and ends[1].time is not None else None
            if made < (UNCLOCKED if span is None else FEW if span < STEP_S else 1):
                return None
            found.append((ends[1], MINUTE if span is None else span))
        if not found:
            return None
        last, span = min(found, key=lambda x: x[1])
        up = self._came_up.get(f.src.file)
        intake = all(b.get("role") == "prefill" for b, _ in found)
        return Sequel(last, span, up is not None and up.src > f.src, intake)

    def lasting(self, events: Iterable[Event]) -> list[Event]:
        """Those that no minute of tokens followed, if there are any; else all of them."""
        found = list(events)
        return [e for e in found if (s := self.sequel(e)) is None or s.span < MINUTE] or found

    @cached_property
    def _came_up(self) -> dict[str, Event]:
        return {up.src.file: up for up in self.events("started")}  # the last of each file

    @cached_property
    def _logs(self) -> dict[tuple[str, str, int | None], _Log]:
        """Lines about batches, by file, by the engine of a pair, and by the data-parallel rank, that wrote them."""
        out: dict[tuple[str, str, int | None], list[Event]] = {}
        for b in [*self.batches, *self.events("trt_iter")]:
            index = b.num("engine")
            dp = b.who.dp if b.who else None
            rank = int(index) if dp is None and index is not None else dp
            out.setdefault((b.src.file, self.side(b), rank), []).append(b)
        return {key: _Log(lines) for key, lines in out.items()}

    def _next_to(self, key: tuple[str, str, int | None]) -> list[tuple[str, str, int | None]]:
        """Logs of that engine which begin where this one ends: it was rotated."""
        ends = self._logs[key].by_clock.places[-1:]
        begins = {k: v.by_clock.places[:1] for k, v in self._logs.items() if k != key and k[1:] == key[1:]}
        return [k for k, first in begins.items() if ends and first and first >= ends]


def _folder(key: tuple[str, str, int | None]) -> str:
    return key[0].rpartition("/")[0]


def _idle(b: Event) -> bool:
    """Whether a line says that there was nothing to do."""
    return b.num("running") == 0 and not (b.num("waiting") or b.num("queue") or _tokens(b))


def _tokens(b: Event) -> bool:
    """Whether a line shows tokens; of a prefill engine those that it takes in, which say nothing of any other."""
    if b.kind == "trt_iter":
        return (b.num("scheduled") or 0) > 0
    if b.get("role") == "prefill":
        return (b.num("new_tokens") or b.num("prompt") or b.num("gen") or 0) > 0
    return (b.num("gen") or 0) > 0
