"""The verdict as Markdown, and as an upstream bug report in the engine's own form."""

from closeranks.diagnose import clock
from closeranks.diagnose.verdict import Finding, Verdict
from closeranks.evidence.redact import redact, redact_addresses

# The projects' bug report forms: headings in their order, and what goes under each.
_FORMS = {
    "sglang": (("Describe the bug", "bug"), ("Reproduction", "reproduction"), ("Environment", "environment")),
    "vllm": (
        ("Your current environment", "environment"),
        ("🐛 Describe the bug", "bug"),
        ("How to reproduce", "reproduction"),
    ),
    "tensorrt-llm": (
        ("System Info", "environment"),
        ("Reproduction", "reproduction"),
        ("Expected behavior", "expected"),
        ("actual behavior", "bug"),
    ),
    "": (("What happens", "bug"), ("How to reproduce", "reproduction"), ("Environment", "environment")),
}


def render(verdict: Verdict) -> str:
    """The whole verdict."""
    out = ["# closeranks diagnose", ""]
    for i, f in enumerate(verdict.findings):
        out += [
            f"## {'Verdict' if i == 0 else f'Finding {i + 1}'}: {f.cls} ({f.certainty})",
            "",
            _inline(f.summary),
            "",
        ]
        out += _body(f)
    if verdict.patched:
        out += ["## Patched areas of the installed engine", ""]
        out += [f"- {_inline(area)}: {_inline(n)} differ from the release" for area, n in verdict.patched.items()]
        out.append("")
    if verdict.timeline:
        out += ["## Timeline", ""]
        out += [f"- {clock.show(e.time)} `{_name(e.file)}:{e.line}` {_inline(e.says)}" for e in verdict.timeline[:60]]
        out.append("")
    out += ["## What was read", "", *(f"- {_inline(line)}" for line in [*verdict.coverage, *verdict.notes[:40]]), ""]
    return redact("\n".join(out))


def _inline(text: str) -> str:
    """Text within a line: names of the evidence make no table, no tag and no link of it."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(").replace("\n", " ")


def _name(file: str) -> str:
    """A file's name within backticks: it cannot leave them, and no renderer finds a tag in it."""
    return file.replace("`", "'").replace("<", "‹").replace(">", "›").replace("\n", " ")


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
    out += ["", *(f"- `{_name(e.file)}:{e.line}` {_inline(e.says)}" for e in f.evidence), ""]
    return out


def issue(verdict: Verdict) -> str:
    """A bug report in the form of the engine's project: the main finding, and the environment as far as it is known.

    Without addresses, folders of the host, or keys.
    """
    parts = {
        "bug": _bug(verdict),
        "reproduction": _reproduction(verdict),
        "environment": _environment(verdict),
        "expected": ["Requests are answered.", ""],
    }
    out: list[str] = []
    for heading, part in _FORMS.get(verdict.family, _FORMS[""]):
        out += [f"### {heading}", "", *parts[part]]
    return redact_addresses(redact("\n".join(out)))


def _bug(verdict: Verdict) -> list[str]:
    f = verdict.main
    out = [f"{_inline(f.summary)} ({f.certainty})", ""]
    if f.ranks:
        out += ["Where each rank stands:", "", "| rank | where it waits |", "|---|---|"]
        out += [f"| {_inline(r)} | {_inline(w)} |" for r, w in list(f.ranks.items())[:64]]
        out.append("")
    for name, items in (
        ("Mechanism", [f.mechanism]),
        ("Shown", f.shown),
        ("Only likely", f.likely),
        ("Ruled out", f.decoys),
    ):
        items = [i for i in items if i]
        if items:
            out += [f"{name}:", "", *(f"- {_inline(i)}" for i in items), ""]
    out += [
        "Evidence:",
        "",
        "```",
        *(f"{_name(e.file.rsplit('/', 1)[-1])}:{e.line}: {_name(e.says)}" for e in f.evidence),
        "```",
        "",
    ]
    if f.known_issues:
        out += ["Possibly related:", "", *(f"- {k.id}: {_inline(k.reason)}" for k in f.known_issues), ""]
    return out


def _reproduction(verdict: Verdict) -> list[str]:
    flags = verdict.environment.get("Flags", []) + verdict.environment.get("Variables", [])
    start = ["Started with (known flags and variables only):", "", "```", *flags, "```", ""] if flags else []
    return [*start, f"Trigger: {_inline(verdict.main.trigger)}" if verdict.main.trigger else "Trigger: not known.", ""]


def _environment(verdict: Verdict) -> list[str]:
    out: list[str] = []
    for name, lines in verdict.environment.items():
        if name not in ("Flags", "Variables"):
            out += [f"{name}:", "", *(f"- {_inline(line)}" for line in lines), ""]
    lacking = [n for n, key in (("versions", "Versions"), ("flags", "Flags")) if not verdict.environment.get(key)]
    lacking += [] if any("GPU" in line for line in verdict.environment.get("Topology", [])) else ["hardware"]
    out += [*(f"- read: {_inline(line)}" for line in verdict.coverage), ""]
    return [*out, f"(Not in the evidence, please add: {', '.join(lacking)}.)", ""] if lacking else out
