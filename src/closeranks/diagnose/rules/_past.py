"""What a finding rests on may have passed: then it explains nothing of the present, and comes after what does.

An operator's bundle reaches back for hours. An event after which the same engine made tokens, not of a step that was
under way, did not stop it; what stands now stands for another reason. Faults that concern single requests leave an
engine alive: those count as passed only long after.
"""

from msgspec.structs import replace

from closeranks.diagnose import health
from closeranks.diagnose.facts import Collective, Event, Fact, GroupStatus
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.scene.past import MINUTE, Sequel
from closeranks.diagnose.verdict import LIKELY, SHOWN, SOUND, Evidence, Finding

PAST = 98  # the stage of what has passed
BEFORE_HEALTH = 69  # the stage of what concerned requests a while ago: after standstills, before what is well

# Faults of single requests or of a peer: tokens of others flow beside them.
OF_REQUESTS = frozenset(
    """KV_TRANSFER REQUEST_LEAK ROUTER STALE_PEER NETWORK_OR_TRANSPORT IPC_OR_EXTERNAL_LOST
    FRONTEND_OR_CPU_BOUND""".split()  # noqa: SIM905
)
OF_PAIRS = frozenset({"KV_TRANSFER", "STALE_PEER", "ROUTER"})  # told by one engine, and the other may stand for it
A_WHILE_S = 300.0
LONG_S = 1800.0

# Kinds of which each event is a case of its own; of the others the last one counts, whichever a finding cites.
_SINGLE = frozenset({"exception", "rank_exception", "fatal", "child_crashed"})
# States that were read when the evidence was taken, and closeranks' own account of an epoch's end.
_READINGS = frozenset(
    """cpu_periods cpu_throttled accept_queue_full unread_connections retransmits ps_listing load top_row top_head
    acs_redirect ras_report ras_peer_dead recorder_dump recorder_file recorder_files_incomplete fr_missing
    debug_info incident""".split()  # noqa: SIM905
)
_CONTEXT = (health.HARMLESS - _READINGS) | {"leg_dispatched", "container_started"}


class Cited:
    """Facts behind the evidence of findings, by file and line."""

    def __init__(self, scene: Scene, findings: list[Finding]) -> None:
        lines = {(e.file, e.line) for f in findings for e in f.evidence}
        self._at: dict[tuple[str, int], list[Fact]] = {}
        for fact in scene.facts:
            if (key := (fact.src.file, fact.src.line)) in lines:
                self._at.setdefault(key, []).append(fact)

    def behind(self, e: Evidence) -> list[Fact]:
        """The facts that one line of evidence says; all of its line where none can be told."""
        found = self._at.get((e.file, e.line), [])
        return [f for f in found if f.says() == e.says] or found


def demoted(scene: Scene, f: Finding, cited: Cited) -> Finding:
    """The finding, after those of the present and without its certainty if all that it rests on has passed."""
    if f.cls in SOUND or f.cls == "NOT_HUNG_SLOW_OR_CAPACITY" or (seen := _sequel(scene, f, cited)) is None:
        return f
    if f.cls in OF_PAIRS and not seen.reborn and seen.intake:
        # What prefill takes in says nothing of decode.
        words = f"prefill took in tokens for {_long(seen.span)} after it ({seen.last.src})"
        return replace(f, certainty=LIKELY, likely=[*f.likely, words]) if f.certainty == SHOWN else f
    if f.cls in OF_REQUESTS and not seen.reborn and seen.span < LONG_S:
        return replace(f, stage=max(f.stage or 0, BEFORE_HEALTH)) if seen.span >= A_WHILE_S else f
    if seen.span < MINUTE:
        return f
    how = "the engine came up anew and" if seen.reborn else "the engine"
    words = f"this has passed: {how} made tokens for {_long(seen.span)} after it ({seen.last.src})"
    return replace(
        f,
        stage=PAST,
        certainty=LIKELY if f.certainty == SHOWN else f.certainty,
        summary=f"{f.summary} It has passed: tokens followed for {_long(seen.span)}.",
        likely=[*f.likely, words],
    )


def told(findings: list[Finding]) -> list[Finding]:
    """The findings, main first, with what has passed named among the main one's decoys."""
    past = [f for f in findings if f.stage == PAST]
    if not past or not findings or findings[0].stage == PAST:
        return findings
    decoys = [f"{f.summary} ({f.evidence[0].file}:{f.evidence[0].line})" for f in past[:4]]
    return [replace(findings[0], decoys=[*findings[0].decoys, *decoys]), *findings[1:]]


def _sequel(scene: Scene, f: Finding, cited: Cited) -> Sequel | None:
    """What followed all that the finding rests on, the shortest; None if something of it is of the present."""
    rests: dict[object, Fact] = {}
    for e in f.evidence:
        for fact in cited.behind(e):
            if isinstance(fact, Event):
                if fact.kind in _READINGS:
                    return None
                if fact.kind in _CONTEXT:
                    continue
                rests[fact.kind, fact.src if fact.kind in _SINGLE else None] = fact
            elif isinstance(fact, Collective | GroupStatus):
                rests[fact.src] = fact
            elif fact.says() == e.says:
                return None  # a dump, a reading of a device or of a counter: it is of now
    for key, fact in list(rests.items()):
        if isinstance(fact, Event) and fact.kind not in _SINGLE:
            rests[key] = max(scene.events(fact.kind), key=lambda x: (x.time or 0.0, x.src), default=fact)
    found = [scene.sequel(fact, of_all=f.cls in OF_PAIRS) for fact in rests.values()]
    spans = [s for s in found if s is not None]
    return min(spans, key=lambda s: s.span) if spans and len(spans) == len(found) else None


def _long(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"
