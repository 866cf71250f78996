"""The laws that the source and the processes of an engine keep, read from the source or the process itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "closeranks"
RANK = SRC / "engine" / "rank"

COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
}


def names_of(tree: ast.AST) -> set[str]:
    """Dotted names that a file imports or reads, e.g. `torch.distributed.all_reduce`, aliases resolved."""
    alias: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                alias[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                alias[a.asname or a.name] = f"{node.module}.{a.name}"
    found = set(alias.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            inner: ast.AST = node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in alias:
                found.add(".".join([alias[inner.id], *reversed(parts)]))
    return found


def distributed(tree: ast.AST) -> set[str]:
    """Uses of torch.distributed in a file, beyond asking whether it is there."""
    return {name for name in names_of(tree) if name.startswith(("torch.distributed", "torch._C._distributed"))}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_collectives_module_uses_torch_distributed(path: Path) -> None:
    if RANK / "collectives" in path.parents or SRC / "lab" / "specimens" in path.parents:
        return
    assert not distributed(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "breach",
    [
        "import torch.distributed as dist\ndist.all_reduce(t)",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import broadcast as b\nb(t)",
        "import torch\ntorch.distributed.all_gather(a, b)",
        "from torch.distributed.distributed_c10d import all_reduce",
    ],
)
def test_the_scan_sees_every_way_to_call_them(breach: str) -> None:
    assert distributed(ast.parse(breach))


@pytest.mark.parametrize("module", ["closeranks.engine.leader.__main__", "closeranks.gateway.__main__"])
def test_processes_that_decide_hold_no_torch(module: str) -> None:
    path = SRC.parent / (module.replace(".", "/") + ".py")
    if not path.exists():
        pytest.skip(f"{module} is not there")
    code = f"import sys, {module}; print(sorted({{'torch', 'numba', 'nixl_cu12', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


DECIDING = ["loop.py", "runner.py", "sampler.py", "digest.py", "planes.py", "models/llama.py", "models/batch.py"]
"""What a rank computes its results with. Waits and beats have clocks; they are elsewhere."""

DRAWS = ("random.", "secrets.", "uuid.", "os.urandom", "numpy.random", "torch.rand", "torch.multinomial", "torch.seed")
CLOCKS = ("time.", "datetime.")
MEASURES = {"time.perf_counter"}
"""May be read to report a duration; never compared."""


def clock_in_a_condition(tree: ast.AST) -> list[str]:
    """Conditions and comparisons that contain a call of a clock or a name assigned from one."""
    tainted = {"perf_counter", "monotonic", "time", "process_time"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(n, ast.Attribute) and n.attr in tainted for n in ast.walk(node.value)
        ):
            tainted |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    found = []
    for node in ast.walk(tree):
        tests = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) else []
        tests += [node] if isinstance(node, ast.Compare) else []
        for test in tests:
            if any(
                (isinstance(n, ast.Attribute) and n.attr in tainted) or (isinstance(n, ast.Name) and n.id in tainted)
                for n in ast.walk(test)
            ):
                found.append(ast.unparse(test))
    return found


def set_iterations(tree: ast.AST) -> list[str]:
    """Loops over what is visibly a set: a literal, a comprehension, `set(...)`, set algebra of these, a name of one."""
    names = set()

    def is_set(node: ast.AST) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("set", "frozenset"):
                return True
            return node.func.id in ("list", "tuple", "enumerate", "iter", "reversed") and any(map(is_set, node.args))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
            return is_set(node.left) or is_set(node.right)
        return isinstance(node, ast.Name) and node.id in names

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_set(node.value):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    loops = [n.iter for n in ast.walk(tree) if isinstance(n, ast.For | ast.comprehension)]
    return [ast.unparse(loop) for loop in loops if is_set(loop)]


@pytest.mark.parametrize("name", DECIDING)
def test_no_clock_no_draw_and_no_set_order_decides_in_a_rank(name: str) -> None:
    tree = ast.parse((RANK / name).read_text())
    used = names_of(tree)
    assert not {n for n in used if n.startswith(DRAWS)} - {"os.urandom"} if name == "planes.py" else True
    if name != "planes.py":  # the pool's stamp is random; it is no part of any result
        assert not {n for n in used if n.startswith(DRAWS)}
    assert not {n for n in used if n.startswith(CLOCKS)} - MEASURES
    assert not clock_in_a_condition(tree)
    assert not set_iterations(tree)


@pytest.mark.parametrize(
    ("check", "breach"),
    [
        (clock_in_a_condition, "import time\nt = time.monotonic()\nif t > 3: stop()"),
        (clock_in_a_condition, "import time\nwhile time.monotonic() < end: pass"),
        (set_iterations, "rows = {1, 2}\nfor r in rows: run(r)"),
        (set_iterations, "x = [f(r) for r in set(rows) - done]"),
        (set_iterations, "for i, r in enumerate(set(rows)): run(r)"),
    ],
)
def test_the_scans_see_a_breach(check: object, breach: str) -> None:
    assert check(ast.parse(breach))  # type: ignore[operator]
