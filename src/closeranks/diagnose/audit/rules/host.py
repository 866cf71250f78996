"""This machine: whether a wedge could be explained on it. Judged only when the audit was asked to (`--host`)."""

from collections.abc import Iterable

from closeranks.diagnose.audit.model import Deployment
from closeranks.diagnose.audit.rule import Hit, Open, rule


@rule(
    "host-no-pyspy",
    "warning",
    "observability",
    "py-spy is not found by PATH",
    why="SGLang's watchdog calls it by name and logs `py-spy: not found` instead of stacks.",
    fix="Install py-spy and put its folder on the PATH of the engine's service.",
    refs=("sglang#7783",),
)
def host_no_pyspy(deployment: Deployment) -> Iterable[Hit | Open]:
    if deployment.host is not None and not deployment.host.pyspy:
        yield Hit("this host", "no py-spy on PATH")


@rule(
    "host-no-ptrace",
    "warning",
    "observability",
    "This user cannot take stacks of the engine",
    why="Yama forbids ptrace of processes that are not children; py-spy then fails with `Permission denied`.",
    fix="Run the capture with CAP_SYS_PTRACE or as root, or set kernel.yama.ptrace_scope=0.",
)
def host_no_ptrace(deployment: Deployment) -> Iterable[Hit | Open]:
    host = deployment.host
    if host is None or host.ptrace_scope is None:
        return
    if host.ptrace_scope >= 3 or (host.ptrace_scope >= 1 and not host.cap_sys_ptrace and not host.root):
        yield Hit("this host", f"kernel.yama.ptrace_scope = {host.ptrace_scope}, CAP_SYS_PTRACE not held")
