"""The import arrows: who may import whom, read from the source itself (AST), not from what happened to be loaded."""

import ast
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "closeranks"

# part -> parts of closeranks that it may import besides itself. `None`: everything.
ARROWS: dict[str, set[str] | None] = {
    "protocol": set(),
    "faults": set(),
    "lifeline": set(),
    "output": set(),
    "codec": set(),
    "catalog": set(),
    "evidence": set(),
    "diagnose": {"catalog", "evidence"},
    "engine.leader": {"protocol", "faults", "lifeline", "output"},
    "engine.rank": {"protocol", "faults", "lifeline", "output"},
    "supervise": {"evidence", "faults", "lifeline", "output"},
    "gateway": {"codec", "protocol", "catalog", "faults", "lifeline", "output"},
    "watch": {"evidence", "diagnose", "supervise"},
    "lab": {"supervise"},
    "cli": None,
}
ONLY_IN_RANK = {"torch", "numba", "nixl_cu12", "nixl_cu13", "safetensors", "gguf"}


def part_of(module: str) -> str:
    names = module.split(".")
    if names[:1] == ["engine"]:
        return ".".join(names[:2])
    return names[0]


@cache
def imports(path: Path) -> list[str]:
    """Every module name imported in a file, also inside functions, relative ones made absolute."""
    package = ("closeranks", *path.relative_to(SRC).with_suffix("").parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            found += [module, *(f"{module}.{alias.name}" for alias in node.names if module.startswith("closeranks"))]
    return found


FILES = sorted(SRC.rglob("*.py"))
SPECIMEN_PROGRAMS = SRC / "lab" / "specimens" / "programs"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_arrows_hold(path: Path) -> None:
    own = part_of(".".join(path.relative_to(SRC).with_suffix("").parts))
    if own in ("__init__", "engine.__init__"):
        return
    assert own in ARROWS, f"{path} belongs to no part of the layout: add its arrows to ARROWS"
    allowed = ARROWS[own]
    for name in imports(path):
        if not name.startswith("closeranks."):
            continue
        other = part_of(name.removeprefix("closeranks."))
        if allowed is None or other == own or other not in ARROWS:
            continue
        assert other in allowed, f"{path} imports {name}: {own} may import only {sorted(allowed)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_rank_imports_torch(path: Path) -> None:
    if path.relative_to(SRC).parts[:2] == ("engine", "rank"):
        return
    # Programs that play an engine with real gloo collectives: run as scripts, imported by nobody (tested below).
    if path.is_relative_to(SPECIMEN_PROGRAMS):
        return
    heavy = {name.split(".")[0] for name in imports(path)} & ONLY_IN_RANK
    assert not heavy, f"{path} imports {heavy}: only engine/rank may"


def test_only_cli_imports_the_engine() -> None:
    for path in FILES:
        parts = path.relative_to(SRC).parts
        if parts[0] in ("engine", "cli"):
            continue
        assert not [n for n in imports(path) if n.startswith("closeranks.engine")], f"{path} imports the engine"


def test_specimen_programs_are_started_never_imported() -> None:
    for path in FILES:
        if not path.is_relative_to(SPECIMEN_PROGRAMS):
            assert not [n for n in imports(path) if n.startswith("closeranks.lab.specimens.programs")], path
