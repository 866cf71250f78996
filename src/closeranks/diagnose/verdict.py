"""The verdict: findings, most causal first, and the order that makes one of them the main one."""

from collections.abc import Iterable

import msgspec

from closeranks.diagnose.facts import Fact

CLASSES = (
    "DESYNC_DIFFERENT_COLLECTIVE", "DESYNC_SAME_OP_SHAPE_OR_SEQ", "MISSING_PARTICIPANT", "UNMATCHED_COLLECTIVE_OR_P2P",
    "PP_STALL", "SYMMETRIC_WAIT", "DEVICE_HANG", "RUNTIME_LIBRARY_DEADLOCK", "HOST_DEVICE_INTERLOCK", "KV_TRANSFER",
    "STALE_PEER", "DEAD_PEER", "CRASH_LOOKS_LIKE_HANG", "HEALTH_FALSE_OK_ENGINE_DEAD", "FRONTEND_OR_CPU_BOUND",
    "GIL_DEADLOCK", "IPC_OR_EXTERNAL_LOST", "REQUEST_LEAK", "SCHEDULER_LIVELOCK", "UNSCHEDULABLE_REQUEST",
    "NOT_HUNG_SLOW_OR_CAPACITY", "HEALTHY_IDLE", "HEALTHY_WATCHDOG_FALSE_POSITIVE", "STARTUP", "ROUTER",
    "NETWORK_OR_TRANSPORT", "UNDETERMINED",
)  # fmt: skip
SOUND = ("HEALTHY_IDLE", "HEALTHY_WATCHDOG_FALSE_POSITIVE")
SHOWN, LIKELY, UNDETERMINED = "shown", "likely", "undetermined"


class Evidence(msgspec.Struct, frozen=True):
    """One line of evidence, cited and rendered from parsed fields."""

    file: str
    line: int
    says: str
    time: float | None = None


class KnownIssue(msgspec.Struct, frozen=True):
    """A catalog entry that matched, and why."""

    id: str
    reason: str
    workaround: str = ""
    price: str = ""
    fix: str = ""
    certainty: str = LIKELY
    checked: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `shown` sentences follow from the evidence alone; `likely` ones do not."""

    cls: str
    certainty: str
    summary: str
    rule: str = ""
    stage: int | None = None
    engine: str = ""
    ranks: dict[str, str] = {}
    missing: list[str] = []
    ahead: list[str] = []
    trigger: str = ""
    mechanism: str = ""
    shown: list[str] = []
    likely: list[str] = []
    decoys: list[str] = []
    next_checks: list[str] = []
    workaround: str = ""
    evidence: list[Evidence] = []
    known_issues: list[KnownIssue] = []


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one bundle, the main one first; never empty."""

    findings: list[Finding]
    family: str = ""  # the engine that the evidence is of: sglang, vllm, tensorrt-llm, dynamo, torch
    notes: list[str] = []
    files: list[str] = []
    patched: dict[str, str] = {}  # area of the installed engine that is not its release's → files, engine
    environment: dict[str, list[str]] = {}  # Versions, Flags, Variables, Topology → lines
    timeline: list[Evidence] = []
    coverage: list[str] = []

    @property
    def main(self) -> Finding:
        """The main finding."""
        return self.findings[0]


def cite(facts: Iterable[Fact | None], limit: int = 8) -> list[Evidence]:
    """Evidence of `facts`, without repeats, at most `limit`."""
    out: dict[tuple[str, int, str], Evidence] = {}
    for f in facts:
        if f is not None and len(out) < limit:
            out.setdefault((f.src.file, f.src.line, f.says()), Evidence(f.src.file, f.src.line, f.says(), f.time))
    return list(out.values())
