"""The installed engine against upstream."""

from collections.abc import Iterable

from closeranks.diagnose.audit.model import ChangedFile, Deployment
from closeranks.diagnose.audit.rule import Hit, Open, rule
from closeranks.diagnose.audit.versions import within

SHOWN = 8


def _list(paths: list[str]) -> str:
    rest = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + rest


@rule(
    "install-patched",
    "warning",
    "deployment",
    "Files of the installed engine differ from its wheel",
    why="What upstream's issues and fixes say does not hold for a patched area. A private patch of one plane of the "
    "cache was once the cause of leaked tool calls that parser, template and model were suspected of.",
    fix="Name the patch in every report, compare it with upstream (--wheel FILE), and try without it first.",
)
def install_patched(deployment: Deployment) -> Iterable[Hit | Open]:
    for install in deployment.installs:
        areas: dict[str, list[ChangedFile]] = {}
        for changed in install.changed:
            if install.commits_ahead is None:
                areas.setdefault(changed.area, []).append(changed)
        for area, files in sorted(areas.items()):
            paths = [f"{file.path} ({file.change})" for file in files]
            there = tuple(f"{install.site_packages}/{file.path}" for file in files if file.change != "missing")
            yield Hit(f"{install.name} {install.version}", f"{area}: {_list(paths)}", files=there[:SHOWN])


@rule(
    "install-ahead-of-tag",
    "warning",
    "deployment",
    "The engine is installed from a repository, ahead of a release",
    why="Its version says less than its commit; fixes and faults of that release may be absent or present.",
    fix="Report commit and distance with every finding; try the release first.",
)
def install_ahead_of_tag(deployment: Deployment) -> Iterable[Hit | Open]:
    for install in deployment.installs:
        if install.commits_ahead is not None and (install.commits_ahead or install.changed):
            areas = sorted({changed.area for changed in install.changed})
            since = f"{install.commits_ahead} commits ahead of {install.tag or 'its release'}"
            changed = f"; changed: {', '.join(areas)} ({len(install.changed)} files)" if areas else ""
            yield Hit(f"{install.name} {install.version}", f"{since}, commit {install.git_commit[:12] or '?'}{changed}")


@rule(
    "install-stand-in",
    "warning",
    "deployment",
    "A package that the engine imports belongs to no distribution",
    why="Someone put it there by hand: a stand-in or a patched copy that shadows the real one.",
    fix="Install the real distribution, or name the stand-in in every report.",
)
def install_stand_in(deployment: Deployment) -> Iterable[Hit | Open]:
    for name in deployment.unowned:
        yield Hit(name, f"{name}/ is in site-packages, no RECORD lists it")


@rule(
    "install-not-comparable",
    "note",
    "deployment",
    "The installed engine cannot be compared with upstream",
    why="Without RECORD or repository nobody can say what runs.",
    fix="Install from a wheel, or keep the repository.",
)
def install_not_comparable(deployment: Deployment) -> Iterable[Hit | Open]:
    for install in deployment.installs:
        problem = "its RECORD is empty" if install.record_empty else install.problem
        if problem:
            yield Hit(f"{install.name} {install.version}", problem)


@rule(
    "nccl-proxy-slots",
    "error",
    "collectives",
    "This NCCL loses its proxy's slots on aarch64",
    why="Freed slots of the proxy's pool leak through a weak compare-exchange until it is empty: one rank spins in "
    "ncclLocalOpAppend while its proxy thread sleeps. It looks like a desynchronisation of the ranks.",
    fix="Install NCCL 2.29.3 or later.",
    refs=("nccl#2353", "sglang#33289"),
)
def nccl_proxy_slots(deployment: Deployment) -> Iterable[Hit | Open]:
    for library in deployment.libraries:
        if library.machine == "aarch64" and within(library.version, "<2.29.3"):
            yield Hit(f"{library.name} {library.version}", f"for {library.machine}")
