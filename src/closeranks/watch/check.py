"""`closeranks watch --check`: the preflight. What engines there are, what can be read of them, and what is blind."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from closeranks.evidence import capture
from closeranks.watch.loop import Watch
from closeranks.watch.settings import Settings
from closeranks.watch.snapshot import Blind, EngineSeen, Proc

LOOKS_S = 4.0
"""Long enough for one reading of every signal."""
Ask = Callable[[Sequence[EngineSeen]], Awaitable[Mapping[str, str]]]


async def check(settings: Settings, could_do: Ask) -> dict[str, Any]:
    """`{"schema": 1, "ok", "engines": [...], "findings": [...]}`. A sound engine is not disturbed: no dump, no probe.

    `could_do` says for each engine what `--act` could do.
    """
    watch, stop = Watch(settings), asyncio.Event()
    watch.on_change = lambda old, state: None
    looking = asyncio.create_task(watch.run(stop))
    searched = await watch.searched()
    await asyncio.sleep(LOOKS_S)
    stop.set()
    await looking
    able = await could_do(watch.snapshot.engines)
    engines = [_engine(engine, watch) | {"act": able.get(engine.name, "")} for engine in watch.snapshot.engines]
    findings = [f for e in engines for f in e.pop("findings")]
    if not searched:
        findings.append("the process table could not be read in time")
    elif not engines:
        findings.append("no engine was found on this machine: none of the known launchers is among the processes")
    if capture.py_spy() is None:
        findings.append("py-spy is not installed: stacks cannot be read, and a wedge is seen later")
    if shutil.which("nvidia-smi") is None:
        findings.append("no nvidia-smi: hangs on a device cannot be told from long steps")
    return {
        "schema": 1,
        "ok": bool(engines) and all(e["judged"] for e in engines),
        "engines": engines,
        "findings": findings,
    }


def may_trace(process: Proc) -> bool:
    """Whether a debugger may attach: the kernel asks the same of whoever opens its memory. Nobody refuses one that has
    ended meanwhile: that it is gone is said of its engine."""
    try:
        os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDONLY))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return True


def _engine(engine: EngineSeen, watch: Watch) -> dict[str, Any]:
    state = watch.states.get(engine.name)
    signals: dict[str, str] = {}
    for signal, readings in watch.snapshot.readings.items():
        own = [v for k, v in readings.items() if k.partition("/")[0] == engine.name]
        if own:
            blind = [v.reason for v in own if isinstance(v, Blind)]
            signals[signal] = "reads" if len(blind) < len(own) else f"blind: {blind[0]}"
    untraced = [p.label for p in engine.parts if not may_trace(p)]
    signals["stacks"] = "can be read" if not untraced else f"blind: no right to trace {', '.join(untraced)}"
    findings = []
    if untraced:
        findings.append(
            f"{engine.name}: stacks cannot be read (run as the same user, with CAP_SYS_PTRACE, and in the same pid "
            "namespace); a wedge is then confirmed by two other signals only"
        )
    found = sum(p.role in ("rank", "worker") for p in engine.procs)
    if engine.world and found not in (0, engine.world) and engine.kind != "trtllm":
        findings.append(f"{engine.name}: {found} ranks were found here, its flags say {engine.world}")
    return {
        "name": engine.name,
        "kind": engine.kind,
        "role": engine.role,
        "url": engine.url,
        "ranks": {p.label: p.pid for p in engine.parts},
        "logs": list(watch.logs.paths(engine)),
        "phase": state.phase if state is not None else "blind",
        "why": [e.text for e in state.why] if state is not None else [],
        "signals": signals,
        "judged": state is not None and state.phase != "blind",
        "findings": findings,
    }


def shown(found: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for engine in found["engines"]:
        lines.append(
            f"{engine['name']}: {engine['kind']}, {engine['role']}, {engine['phase']}, {engine['url'] or 'no address'}"
        )
        if engine["phase"] != "healthy":
            lines += [f"    {engine['phase']:9} {why}" for why in engine["why"]]
        lines.append("    " + ", ".join(f"{label} {pid}" for label, pid in engine["ranks"].items()))
        lines += [f"    log {path}" for path in engine["logs"]]
        lines += [f"    {signal:9} {said}" for signal, said in sorted(engine["signals"].items())]
        lines.append(f"    --act     {engine['act']}")
    lines += [f"! {finding}" for finding in found["findings"]]
    return "\n".join(lines)
