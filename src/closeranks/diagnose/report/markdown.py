"""The verdict as Markdown, and as an upstream bug report in the engine's own form."""

from closeranks.diagnose import clock
from closeranks.diagnose.verdict import Finding, Verdict
from closeranks.evidence.redact import redact, redact_addresses

# Headings of the projects' bug report forms.
_FORMS = {
    "sglang": ("Describe the bug", "Reproduction", "Environment"),
    "vllm": ("🐛 Describe the bug", "How to reproduce", "Your current environment"),
    "tensorrt-llm": ("actual behavior", "Reproduction", "System Info"),
}


def render(verdict: Verdict) -> str:
    """The whole verdict."""
    out = ["# closeranks diagnose", ""]
    for i, f in enumerate(verdict.findings):
        out += [f"## {'Verdict' if i == 0 else f'Finding {i + 1}'}: {f.cls} ({f.certainty})", "", f.summary, ""]
        out += _body(f)
    if verdict.timeline:
        out += ["## Timeline", ""]
        out += [f"- {clock.show(e.time)} `{e.file}:{e.line}` {_inline(e.says)}" for e in verdict.timeline[:60]]
        out.append("")
    out += ["## What was read", "", *(f"- {line}" for line in [*verdict.coverage, *verdict.notes[:40]]), ""]
    return redact("\n".join(out))


def _inline(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _body(f: Finding) -> list[str]:
    out: list[str] = []
    if f.ranks:
        out += ["| rank | where it waits |", "|---|---|"]
        out += [f"| {_inline(rank)} | {_inline(where)} |" for rank, where in list(f.ranks.items())[:128]]
        out.append("")
    for name, items in (
        ("Ahead", f.ahead),
        ("Missing", f.missing),
        ("Trigger", [f.trigger]),
        ("Mechanism", [f.mechanism]),
        ("Shown", f.shown),
        ("Only likely", f.likely),
        ("Not to be misled by", f.decoys),
        ("Workaround", [f.workaround]),
        ("Next check", f.next_checks),
    ):
        items = [i for i in items if i]
        if items:
            out.append(f"**{name}:** {_inline('; '.join(items))}  ")
    for k in f.known_issues:
        more = "".join(
            f". {n}: {v}" for n, v in (("Workaround", k.workaround), ("price", k.price), ("Fix", k.fix)) if v
        )
        out.append(f"**Known issue:** {k.id} ({k.certainty}): {_inline(k.reason)}{_inline(more)}  ")
    out += ["", *(f"- `{e.file}:{e.line}` {_inline(e.says)}" for e in f.evidence), ""]
    return out


def issue(verdict: Verdict) -> str:
    """A bug report for the engine's project: the main finding, without addresses, file names of the host, or keys."""
    f = verdict.main
    bug, repro, environment = _FORMS.get(verdict.family, _FORMS["sglang"])
    out = [f"### {bug}", "", f.summary, ""]
    if f.ranks:
        out += ["Where each rank stands:", "", "| rank | where it waits |", "|---|---|"]
        out += [f"| {_inline(r)} | {_inline(w)} |" for r, w in list(f.ranks.items())[:64]]
        out.append("")
    for name, items in (("Shown", f.shown), ("Only likely", f.likely), ("Ruled out", f.decoys)):
        if items:
            out += [f"{name}:", "", *(f"- {_inline(i)}" for i in items), ""]
    out += ["Evidence:", "", "```", *(f"{e.file.rsplit('/', 1)[-1]}:{e.line}: {e.says}" for e in f.evidence), "```", ""]
    if f.known_issues:
        out += ["Possibly related:", "", *(f"- {k.id}: {_inline(k.reason)}" for k in f.known_issues), ""]
    out += [f"### {repro}", "", f.trigger or "Not known.", "", f"### {environment}", ""]
    out += [*(f"- {line}" for line in verdict.coverage), "", "(Please add versions, flags and hardware.)", ""]
    return redact_addresses(redact("\n".join(out)))
