"""`closeranks watch`: see a wedge in seconds, keep the evidence, say what it is."""

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from closeranks.cli import _recover
from closeranks.cli._settings import SettingsError, add_flags, only
from closeranks.output import make_unblocking
from closeranks.watch.settings import Settings

HELP = "watch the engines on this machine: see a wedge in seconds, keep the evidence, say what it is"
_OPTIONS = _recover.SETTINGS
ONCE_S = 8.0
"""`--once` looks so long, shorter once all is confirmed and kept, and up to `ONCE_LIMIT_S` under a suspicion."""
ONCE_LIMIT_S = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`closeranks watch [--url U … | --pid N …] [--check | --once] [--json]` and every setting."""
    parser.add_argument("auto", nargs="?", choices=["auto"], help="every engine found on this machine (the default)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--check", action="store_true", help="preflight: what is found, what can be read, what is blind")
    form.add_argument("--once", action="store_true", help="judge once and end: 0 sound, 1 a finding, 3 could not judge")
    parser.add_argument("--json", action="store_true", help="JSON, one object per line")
    parser.add_argument("--act", action="store_true", help="recover: end, restart, check, admit (`closeranks recover`)")
    parser.add_argument(
        "--webhook", action="append", default=[], metavar="URL", help="post incidents and outcomes there"
    )
    parser.add_argument(
        "--notify", action="append", default=[], metavar="COMMAND", help="run it, the event on its stdin"
    )
    _recover.add_arguments(parser)
    add_flags(parser, _OPTIONS)


def run(args: argparse.Namespace) -> int:
    """0 sound (or ended by a signal), 1 a finding, 2 usage, 3 nothing to see or could not judge."""
    make_unblocking()
    try:
        values = _recover.values_of("watch", args, _OPTIONS)
        settings = Settings(**only(Settings, values))
        recovery = _recover.recovery_of(args, values, (lambda shown: None) if args.json else _recover.show_step)
    except SettingsError as error:
        print(f"closeranks watch: {error}", file=sys.stderr)
        return 2
    said = _wrong(settings, args.webhook)
    if said:
        print(f"closeranks watch: {said}", file=sys.stderr)
        return 2
    _log_to_stderr(args.json)
    if args.check:
        from closeranks.watch.check import check, shown

        found = asyncio.run(check(settings, lambda engines: _could_do(recovery, engines)))
        print(json.dumps(found) if args.json else shown(found))
        return 0 if found["ok"] else 3
    if args.once:
        return asyncio.run(_once(settings, args.json))
    try:
        after = Afterwards(recovery if args.act else None, args.webhook, args.notify, args.json)
    except ValueError as error:
        print(f"closeranks watch: --notify: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_watch(settings, args.json, after))


def _wrong(settings: Settings, webhooks: Sequence[str]) -> str:
    """What is wrong with the settings, empty if nothing."""
    if not 0.2 <= settings.interval <= 2.0:
        return f"--interval {settings.interval}: between 0.2 and 2 seconds"
    if not -1 <= settings.port <= 65535:
        return f"--port {settings.port}: a port, 0 for any or -1 for none"
    if not (math.isfinite(settings.wait_s) and settings.wait_s >= 0):
        return f"--wait-s {settings.wait_s}: seconds, from 0 on"
    if settings.probe not in ("never", "suspect", "always"):
        return f"--probe {settings.probe}: never, suspect or always"
    bad = next((entry for entry in settings.log if not all(entry.partition("="))), None)
    if bad is not None:
        return f"--log {bad}: ENGINE=FILE, with an engine's name as `closeranks watch --check` shows it"
    bad = next((url for url in settings.url if not _recover.is_address(url, port=True)), None)
    if bad is not None:
        return f"--url {bad}: an address such as http://127.0.0.1:30000"
    if settings.probe_url and not _recover.is_address(settings.probe_url):
        return f"--probe-url {settings.probe_url}: an address such as http://127.0.0.1:30080"
    number = next((n for n, url in enumerate(webhooks, 1) if not _recover.is_address(url)), None)
    return f"--webhook, number {number}: not an http or https address" if number is not None else ""


def _log_to_stderr(as_json: bool) -> None:
    """State changes and incidents go to standard error as log lines."""
    last = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso"), last],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class Afterwards:
    """What is done about an incident: told, and with `--act` recovered from."""

    def __init__(self, recovery: Any, webhooks: list[str], commands: list[str], as_json: bool) -> None:
        from closeranks.watch.notify import Notifier

        self._recovery, self._as_json = recovery, as_json
        self._notifier = Notifier(webhooks, commands)
        self._actor: Any = None
        self._ending: asyncio.Task[None] | None = None

    async def begin(self, watch: Any) -> None:
        """From now on, for this watch."""
        if self._recovery is not None:
            from closeranks.watch.recover_act import Actor

            self._actor = Actor(self._recovery, watch, self._told)
            await self._actor.begin()
        watch.on_incident = self._incident

    def end(self) -> None:
        """Stop acting, in the background: the watch takes its own time to end, and both have one deadline."""
        if self._actor is not None and self._ending is None:
            self._ending = asyncio.create_task(self._actor.close())

    async def close(self) -> None:
        """Stop acting, deliver what is to be told."""
        self.end()
        if self._ending is not None:
            await self._ending
        await self._notifier.close()

    async def _incident(self, found: Any) -> None:
        said = {"event": "incident", **_incident(found)}
        _say(self._as_json, said)
        if found.news:
            self._notifier.send(said)
        if self._actor is not None:
            await self._actor.on_incident(found)

    def _told(self, case: Any, outcome: Any) -> None:
        steps = [f"{s.kind} {s.engine}: {s.event} in {s.took_s} s" for s in outcome.steps]
        said = {
            "event": "recovery",
            "status": outcome.status,
            "says": outcome.says,
            "engines": list(case.blamed) if case else [],
            "plan": outcome.plan,
            "took_s": round(outcome.took_s, 2),
            "steps": steps,
        }
        _say(self._as_json, said if self._as_json else {k: v for k, v in said.items() if k != "steps"})
        self._notifier.send(said)


async def _watch(settings: Settings, as_json: bool, after: Afterwards) -> int:
    from closeranks.watch.loop import Watch
    from closeranks.watch.server import serve

    watch, stop = Watch(settings), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = None
    if settings.port >= 0:
        try:
            runner, port = await serve(watch.told, settings.port)
        except OSError as error:
            print(f"closeranks watch: --port {settings.port}: {error.strerror}", file=sys.stderr)
            return 2
        _say(as_json, {"event": "listening", "port": port})

    await after.begin(watch)
    looking = asyncio.create_task(watch.run(stop))
    alone = asyncio.create_task(_nothing_to_see(watch, settings.wait_s, settings.interval))
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({looking, alone, told}, return_when=asyncio.FIRST_COMPLETED)
        after.end()
        if alone.done() and not stop.is_set():
            stop.set()
            await looking
            print(f"closeranks watch: no engine was found within {settings.wait_s:.0f} s", file=sys.stderr)
            return 3
        await looking
        return 0
    finally:
        alone.cancel()
        told.cancel()
        await after.close()
        if runner is not None:
            await runner.cleanup()


async def _could_do(recovery: Any, engines: Any) -> dict[str, str]:
    """What recovery would do about each engine if it were to blame now."""
    from closeranks.watch.recover_state import Case, Refusal

    found = {}
    for engine in engines:
        made = (await recovery.preview(Case(blamed=(engine.name,)), engines)).plan
        if isinstance(made, Refusal):
            found[engine.name] = f"nothing: {made.reason}"
        else:
            found[engine.name] = ", ".join(f"{a.kind} {a.engine or ' + '.join(a.engines)}" for a in made.actions)
    return found


async def _nothing_to_see(watch: Any, wait_s: float, interval_s: float) -> None:
    """Ends when no engine has been found for `wait_s` from the start; else stays, and says it when all are lost. By
    looks: a time in which the watch was stopped tells nothing."""
    log = structlog.get_logger()
    await watch.searched()
    began, seen, lost = watch.looks, False, 0
    while True:
        await asyncio.sleep(1.0)
        states = watch.states
        seen = seen or bool(states)
        if not seen and (watch.looks - began) * interval_s >= wait_s:
            return
        blind = seen and all(state.phase == "blind" for state in states.values())
        lost = (lost or watch.looks) if blind else 0
        if lost and (blind_s := (watch.looks - lost) * interval_s) > wait_s:
            log.error("the watch sees nothing", engines=sorted(states), for_s=round(blind_s))
            lost = watch.looks


async def _once(settings: Settings, as_json: bool) -> int:
    """Look until every engine is judged, then say what is held of each."""
    from closeranks.watch.loop import Watch
    from closeranks.watch.server import described

    watch, stop = Watch(settings), asyncio.Event()
    watch.on_change = lambda old, state: None
    looking = asyncio.create_task(watch.run(stop))
    await watch.searched()
    began = time.monotonic()
    while (waited := time.monotonic() - began) < ONCE_LIMIT_S:
        await asyncio.sleep(0.25)
        open_ones = [s for s in watch.states.values() if s.phase in ("suspect", "blind")]
        confirmed = [s for s in watch.states.values() if s.phase == "confirmed"]
        if waited >= ONCE_S and not any(s.phase == "suspect" for s in open_ones):
            break
        if confirmed and len(watch.incidents) >= len(confirmed) and not open_ones:
            break
    stop.set()
    await looking
    now = time.monotonic()
    states = [described(state, now) for _, state in sorted(watch.states.items())]
    incidents = [_incident(found) for found in watch.incidents]
    if as_json:
        print(json.dumps({"schema": 1, "states": states, "incidents": incidents}))
    else:
        _table(states, incidents)
    phases = {str(state["phase"]) for state in states}
    if "confirmed" in phases:
        return 1
    return 3 if not phases or phases & {"blind", "suspect"} else 0


def _table(states: list[dict[str, object]], incidents: list[dict[str, object]]) -> None:
    for state in states:
        print(f"{state['engine']:24} {state['phase']}")
        why = state["why"]
        for evidence in why if isinstance(why, list) else []:
            print(f"    [{evidence['signal']}] {evidence['text']}")
        blind = state["blind"]
        for reason in blind if isinstance(blind, list) else []:
            print(f"    blind: {reason}")
    for found in incidents:
        print(f"{found['engine']}: {found['verdict']} ({found['certainty']}): {found['summary']}")
        print(f"    bundle: {found['bundle'] or 'could not be stored'}")
    if not states:
        print("no engine was found")


def _incident(found: Any) -> dict[str, object]:
    return {
        "engine": found.engine,
        "at": found.began,
        "why": list(found.why),
        "bundle": found.folder,
        "bundle_s": found.bundle_s,
        "verdict": found.verdict.cls,
        "certainty": found.verdict.certainty,
        "summary": found.verdict.summary,
        "verdict_s": found.verdict_s,
    }


def _say(as_json: bool, fields: Mapping[str, object]) -> None:
    text = json.dumps({"schema": 1, **fields}) if as_json else "  ".join(f"{k}={v}" for k, v in fields.items())
    print(text, flush=True)
