"""From a bundle to a verdict: collect, set the scene, apply the rules, match the catalog."""

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from closeranks.catalog.known import merged
from closeranks.diagnose.collect import collect
from closeranks.diagnose.environment import environment
from closeranks.diagnose.facts import Event, Fact, Stack, StackFailed
from closeranks.diagnose.match import known_issues
from closeranks.diagnose.rules import apply
from closeranks.diagnose.rules._past import PAST, told
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import SOUND, UNDETERMINED, Evidence, Finding, Verdict, cite
from closeranks.evidence.bundle import Bundle, from_paths, from_texts

# Lines worth a place on the timeline: what happened, not how it went.
_QUIET = frozenset(
    """http decode_batch prefill_batch vllm_stats chunk top_row top_head pool batch_size ps_listing deepep_cell trt_iter
    load aibrix_line recorder_dump recorder_file failed_collective_frame traceback_frame nccl_p2p capacity
    kv_moved waits_for_pages asked""".split()  # noqa: SIM905
)


def diagnose_texts(named: Iterable[tuple[str, str | bytes]], catalog_dirs: Iterable[Path] = ()) -> Verdict:
    """The verdict on (name, content) pairs."""
    return judge(from_texts(named), catalog_dirs)


def diagnose_paths(
    paths: Iterable[str | Path], catalog_dirs: Iterable[Path] = (), known: Iterable[Fact] = ()
) -> Verdict:
    """The verdict on files, folders and archives; `-` is standard input. `known` are facts from elsewhere."""
    return judge(from_paths(paths), catalog_dirs, known)


def judge(bundle: Bundle, catalog_dirs: Iterable[Path] = (), known: Iterable[Fact] = ()) -> Verdict:
    """The verdict on a bundle."""
    found = collect(bundle)
    scene = Scene([*known, *found.facts], found.files, found.notes)
    entries = merged(catalog_dirs)
    findings = _distinct(apply(scene))
    if all(f.stage == PAST for f in findings):
        findings = told([_nothing(scene), *findings])
    issues = [known_issues(scene, f, entries, main=i == 0) if f.stage != PAST else [] for i, f in enumerate(findings)]
    findings = [replace(f, known_issues=k) for f, k in zip(findings, issues, strict=True)]
    return Verdict(
        findings=findings,
        family=scene.family,
        notes=scene.notes,
        files=scene.files,
        patched=scene.patched(),
        environment=environment(scene),
        timeline=_timeline(scene),
        coverage=_coverage(scene),
    )


def _distinct(findings: list[Finding]) -> list[Finding]:
    """One finding per class and engine: the one nearest to the cause. Undetermined says nothing beside a verdict."""
    out: list[Finding] = []
    for f in findings:
        if any((g.cls, g.engine) == (f.cls, f.engine) for g in out):
            continue
        if out and (f.cls == "UNDETERMINED" or (f.cls in SOUND and any(g.cls not in SOUND for g in out))):
            continue
        out.append(f)
    return out


def _nothing(scene: Scene) -> Finding:
    """No rule fired: say what was there and what would decide."""
    checks = []
    if not scene.stacks:
        checks.append("py-spy dump of every rank of the engine, taken within seconds")
    if not scene.gpus:
        checks.append("nvidia-smi utilisation and power per GPU")
    if not scene.batches:
        checks.append("the last 2000 log lines of every rank")
    checks.append("two scrapes of /metrics a minute apart")
    words = "Nothing in the evidence decides." if scene.facts else "Nothing was recognised in the evidence."
    seen = [*scene.stalls[:2], *scene.stacks[:3], *scene.batches[-2:]]
    return Finding(
        cls="UNDETERMINED",
        certainty=UNDETERMINED,
        rule="none",
        stage=99,
        summary=words,
        evidence=cite(seen),
        next_checks=checks,
    )


def _timeline(scene: Scene) -> list[Evidence]:
    events = [e for e in scene.of(Event) if e.time is not None and e.kind not in _QUIET]
    stacks = [s for s in scene.stacks if s.time is not None]
    ends = [b for b in (scene.batches[:1] + scene.batches[-1:]) if b.time is not None]
    calls = [c for c in scene.collectives if c.time is not None]
    found = sorted({id(f): f for f in [*events, *stacks, *ends, *calls]}.values(), key=lambda f: (f.time or 0.0, f.src))
    return cite(found, 200)


def _coverage(scene: Scene) -> list[str]:
    out = []
    for e in scene.engines:
        name = e.name or e.family or "ranks"
        out.append(
            f"{name}: {len(e.ranks)} ranks dumped" + (f", no dump of {', '.join(e.missing[:16])}" if e.missing else "")
        )
    failed = scene.of(StackFailed)
    if failed:
        out.append(f"{len(failed)} dumps failed: no evidence about those ranks")
    if not scene.of(Stack):
        out.append("no stacks")
    return out
