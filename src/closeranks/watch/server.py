"""The watch's own HTTP side, on loopback: `/healthz`, `/metrics`, `/states` and `/liveness/ENGINE`.

`/healthz` is about the watch: 200 only while it looks, and sees something. `/liveness/ENGINE` is for a kubelet in place
of the engine's own `/health`: 503 exactly while that engine is confirmed as faulty, so that nothing is restarted on a
suspicion, nor because the watch is blind; the body says what is held of it.
"""

import time
from collections.abc import Callable, Mapping
from typing import get_args

import msgspec
from aiohttp import web

from closeranks.watch.snapshot import Phase, State

STALE_S = 10.0
PHASES: tuple[Phase, ...] = get_args(Phase)


class Told(msgspec.Struct, frozen=True):
    """What the server tells; made anew for every request by the loop's owner."""

    looked: float
    """Monotonic seconds of the last look."""
    states: Mapping[str, State]
    looks: int
    incidents: int
    confirmations: Mapping[str, int]
    cpu_s: float


def healthy(told: Told, now: float) -> tuple[bool, str]:
    """Whether the watch does what it is for, and otherwise why not."""
    if now - told.looked > STALE_S:
        return False, f"the watch has not looked for {now - told.looked:.0f} s"
    if not told.states:
        return False, "no engine is seen"
    if all(state.phase == "blind" for state in told.states.values()):
        return False, "every engine is blind: nothing can be said of any"
    return True, "looking"


def metrics(told: Told, now: float) -> str:
    """Prometheus text."""
    lines = [
        "# HELP closeranks_watch_up 1 while the watch looks and sees something.",
        "# TYPE closeranks_watch_up gauge",
        f"closeranks_watch_up {int(healthy(told, now)[0])}",
        "# TYPE closeranks_watch_looks_total counter",
        f"closeranks_watch_looks_total {told.looks}",
        "# TYPE closeranks_watch_incidents_total counter",
        f"closeranks_watch_incidents_total {told.incidents}",
        "# TYPE closeranks_watch_cpu_seconds_total counter",
        f"closeranks_watch_cpu_seconds_total {told.cpu_s:.3f}",
        "# HELP closeranks_watch_engine_phase 1 for the phase that an engine is in.",
        "# TYPE closeranks_watch_engine_phase gauge",
    ]
    for name, state in sorted(told.states.items()):
        for phase in PHASES:
            lines.append(
                f'closeranks_watch_engine_phase{{engine="{_label(name)}",phase="{phase}"}} {int(state.phase == phase)}'
            )
    lines.append("# TYPE closeranks_watch_blind_signals gauge")
    lines += [
        f'closeranks_watch_blind_signals{{engine="{_label(n)}"}} {len(s.blind)}' for n, s in sorted(told.states.items())
    ]
    lines.append("# TYPE closeranks_watch_confirmations_total counter")
    lines += [
        f'closeranks_watch_confirmations_total{{engine="{_label(n)}"}} {c}'
        for n, c in sorted(told.confirmations.items())
    ]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def described(state: State, now: float) -> dict[str, object]:
    """A state as JSON."""
    return {
        "engine": state.engine,
        "phase": state.phase,
        "for_s": round(max(0.0, now - state.since), 1),
        "why": [msgspec.to_builtins(e) for e in state.why],
        "blind": list(state.blind),
    }


async def serve(tell: Callable[[], Told], port: int) -> tuple[web.AppRunner, int]:
    """Listen on 127.0.0.1. Returns what to clean up and the port. Raises OSError when it is taken."""

    async def healthz(request: web.Request) -> web.Response:
        ok, said = healthy(tell(), time.monotonic())
        return web.json_response({"ok": ok, "said": said}, status=200 if ok else 503)

    async def metrics_page(request: web.Request) -> web.Response:
        return web.Response(text=metrics(tell(), time.monotonic()), content_type="text/plain")

    async def states(request: web.Request) -> web.Response:
        told, now = tell(), time.monotonic()
        found = [described(s, now) for _, s in sorted(told.states.items())]
        return web.json_response({"schema": 1, "states": found})

    async def liveness(request: web.Request) -> web.Response:
        state = tell().states.get(request.match_info["engine"])
        if state is None:
            return web.json_response({"said": "no engine of this name is seen"}, status=404)
        status = 503 if state.phase == "confirmed" else 200
        return web.json_response(described(state, time.monotonic()), status=status)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics_page), web.get("/states", states)])
    app.add_routes([web.get("/liveness/{engine}", liveness)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, int(runner.addresses[0][1])
