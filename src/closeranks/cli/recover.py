"""`closeranks recover`: end and restart wedged engines by hand, in the steps that the watch would take."""

import argparse
import asyncio
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import structlog

from closeranks.cli import _others, _recover
from closeranks.cli._settings import SettingsError, add_flags
from closeranks.output import make_unblocking
from closeranks.watch import procfs
from closeranks.watch.discover import Finder
from closeranks.watch.recover import Preview, Recovery
from closeranks.watch.recover_act import loops_of
from closeranks.watch.recover_journal import Entry, JournalDamaged, episodes, read
from closeranks.watch.recover_run import Outcome
from closeranks.watch.recover_state import Action, Case, Policy, Refusal
from closeranks.watch.recover_survey import Ending
from closeranks.watch.recover_units import units_of
from closeranks.watch.snapshot import EngineSeen

HELP = "bring wedged engines back: end their process trees, start them, check the path (or show how, with --dry-run)"
_OPTIONS = _recover.part_of(Policy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One of --dry-run, --act, --resume, --give-up, --stop, --go-on, --journal; engines and the policy."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--dry-run", action="store_true", help="show the steps and their commands, change nothing")
    what.add_argument("--act", action="store_true", help="carry them out")
    what.add_argument("--resume", action="store_true", help="go on with a recovery that was interrupted, or close it")
    what.add_argument("--give-up", action="store_true", help="close it, whatever it has ended and not started")
    what.add_argument(
        "--stop", action="store_true", help="no step of any recovery begins any more, the watch's included"
    )
    what.add_argument("--go-on", action="store_true", help="take --stop back")
    what.add_argument("--journal", action="store_true", help="what was done, step by step")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME",
        help="one to blame, or gateway or service of closeranks; repeatable",
    )
    parser.add_argument("--verdict", default="UNDETERMINED", metavar="CLASS", help="what `closeranks diagnose` said")
    parser.add_argument("--json", action="store_true", help="JSON, schema 1")
    _recover.add_arguments(parser)
    add_flags(parser, _OPTIONS)


def run(args: argparse.Namespace) -> int:
    """0 recovered or shown, 1 failed or refused, 2 usage, 3 no such engine, stopped, or another process acts."""
    make_unblocking()  # a closed pipe must not end a plan between its end and its start
    structlog.configure(  # the steps are printed; what is logged beside them goes to standard error
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        show = (lambda shown: None) if args.json else _recover.show_step
        values = _recover.values_of("recover", args, _OPTIONS)
        recovery = _recover.recovery_of(args, values, show)
    except SettingsError as error:
        print(f"closeranks recover: {error}", file=sys.stderr)
        return 2
    if args.stop or args.go_on:
        code = _stop(recovery, args.stop)
        return 3 if _out_of_reach(args, recovery) else code
    if args.journal or args.resume or args.give_up:
        _out_of_reach(args, recovery)
    if args.journal:
        return _journal(recovery, args.json)
    if args.resume or args.give_up:
        outcome = asyncio.run(_ending_well(recovery, recovery.resume() if args.resume else recovery.give_up()))
        if outcome is None:
            return _nothing(args.json)
        code = _say(outcome, args.json)
        return 0 if args.give_up and outcome.plan else code
    if not args.engine:
        print("closeranks recover: --engine NAME says which is to blame; `closeranks watch --check` lists them",
              file=sys.stderr)  # fmt: skip
        return 2
    engines = Finder().find()
    blamed, wrong = _named(args.engine, units_of(engines))
    if wrong:
        print(f"closeranks recover: {wrong}", file=sys.stderr)
        return 3
    case = Case(blamed=blamed, verdict=args.verdict, summary="by an operator", by_hand=True)
    return asyncio.run(
        _dry_run(recovery, case, engines, args.json) if args.dry_run else _act(recovery, case, engines, args.json)
    )


def _named(wanted: Sequence[str], engines: Sequence[EngineSeen]) -> tuple[tuple[str, ...], str]:
    """Names of engines; a beginning is enough where it fits one (`decode`). And what is wrong with them."""
    found = []
    for text in wanted:
        fits = [e.name for e in engines if e.name == text] or [e.name for e in engines if e.name.startswith(text)]
        if len(fits) != 1:
            seen = ", ".join(e.name for e in engines) or "none"
            return (), f"--engine {text}: {'several fit' if fits else 'no such engine'}; seen here: {seen}"
        found.append(fits[0])
    return tuple(dict.fromkeys(found)), ""


async def _dry_run(recovery: Recovery, case: Case, engines: Sequence[EngineSeen], as_json: bool) -> int:
    preview = await recovery.preview(case, engines, await loops_of(engines))
    made = preview.plan
    if isinstance(made, Refusal):
        if as_json:
            print(json.dumps({"schema": 1, "plan": None, "refused": made.reason, "wait_s": made.wait_s}))
        else:
            print(f"nothing would be done: {made.reason}")
        return 1
    steps = [
        {
            "step": number,
            "kind": action.kind,
            "engines": list(action.engines),
            "deadline_s": action.deadline_s,
            "why": action.why,
            "command": shlex.join(_command(preview, action)),
        }
        for number, action in enumerate(made.actions)
    ]
    if as_json:
        ends = [msgspec.to_builtins(e) for e in preview.ends]
        print(json.dumps({"schema": 1, "plan": steps, "engines": ends, "notes": made.notes,
                          "untried": preview.untried}))  # fmt: skip
        return 0
    number = 0
    for place, rung in enumerate(made.rungs):
        print(f"{rung.name}{', only if the check before it fails' if place else ''}:")
        for action in rung.actions:
            if action.kind == "end":
                _show_ending(preview.of(action.engine))
        for action in rung.actions:
            print(f"  {number:2} {action.kind:6} {', '.join(action.engines)}  (at most {action.deadline_s:.0f} s)")
            if line := _command(preview, action):
                print(f"       {shlex.join(line)}")
            number += 1
    print("then:")
    for action in made.after:
        print(f"  {number:2} {action.kind:6} {', '.join(action.engines)}")
        number += 1
    for note in made.notes:
        print(f"note: {note}")
    for name in preview.untried:
        print(f"note: the commands of {name} follow its documentation; they were not run in this project's tests")
    return 0


def _command(preview: Preview, action: Action) -> tuple[str, ...]:
    """The command line of a step that has one."""
    if action.kind == "end":
        return preview.of(action.engine).end
    return preview.of(action.engine).start if action.kind == "start" else ()


def _show_ending(found: Ending) -> None:
    """Platform, process tree and start of one engine."""
    print(f"  {found.engine}: platform {found.platform}{f', {found.unit}' if found.unit else ''}; its processes:")
    parents = {pid: parent for pid, parent, _ in found.processes}
    for pid, parent, title in found.processes:
        depth = 0
        while parent in parents and depth < 8:
            depth, parent = depth + 1, parents[parent]
        print(f"    {pid:>8}  {'  ' * depth}{title}")
    said = shlex.join(found.start) if found.start else "its supervisor, without a command of ours"
    print(f"    started again by: {said}")
    if found.detail:
        print(f"      {found.detail}")


async def _act(recovery: Recovery, case: Case, engines: Sequence[EngineSeen], as_json: bool) -> int:
    async def acting() -> Outcome:
        return await recovery.recover(case, engines, await loops_of(engines))

    outcome = await _ending_well(recovery, acting())
    return _say(outcome, as_json) if outcome else _nothing(as_json)


async def _ending_well(recovery: Recovery, acting: Coroutine[Any, Any, Outcome | None]) -> Outcome | None:
    """Its outcome. A signal that is to end us is heeded when what was ended is started, or that takes too long."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, told.set)
    task, end = asyncio.create_task(acting), asyncio.create_task(told.wait())
    await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    if not task.done():
        await recovery.settled()
        task.cancel()
        await asyncio.wait({task})
    if task.cancelled():
        return Outcome(
            status="stopped", says="ended by a signal; `closeranks recover --resume` goes on with what is open"
        )
    return task.result()


def _say(outcome: Outcome, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"schema": 1, **msgspec.to_builtins(outcome)}))
    else:
        print(f"{outcome.status}: {outcome.says}" + (f" ({outcome.took_s:.1f} s)" if outcome.took_s else ""))
    return {"recovered": 0, "failed": 1, "refused": 1}.get(outcome.status, 3)


def _nothing(as_json: bool) -> int:
    print(json.dumps({"schema": 1, "status": "nothing"}) if as_json else "no recovery is open")
    return 0


def _out_of_reach(args: argparse.Namespace, recovery: Recovery) -> bool:
    """Whether somebody acts whom this command does not concern, unless its folder was chosen; says so."""
    if args.state_dir or os.environ.get("CLOSERANKS_STATE_DIR"):
        return False
    found = _others.out_of_reach(procfs.scan({}).values(), recovery.folder)
    for one in found:
        print(f"closeranks recover: {one}: this does not concern it; run it as that user, or with its --state-dir",
              file=sys.stderr)  # fmt: skip
    return bool(found)


def _stop(recovery: Recovery, stop: bool) -> int:
    try:
        if stop:
            recovery.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            recovery.stop_file.write_text(
                f"{_others.name_of(os.getuid())} at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
            )
        else:
            recovery.stop_file.unlink(missing_ok=True)
    except OSError as error:
        hint = ": run it as the user that acts, or as root" if isinstance(error, PermissionError) else ""
        print(f"closeranks recover: {recovery.stop_file}: {error.strerror}{hint}", file=sys.stderr)
        return 3
    print(f"{recovery.stop_file} {'is there: no step begins' if stop else 'is gone: steps may begin'}")
    return 0


def _journal(recovery: Recovery, as_json: bool) -> int:
    try:
        entries = read(recovery.folder / "journal")
    except (OSError, JournalDamaged) as error:
        print(f"closeranks recover: {error}", file=sys.stderr)
        return 3
    if as_json:
        for entry in entries:
            print(json.dumps({"schema": 1, **_flat(entry)}))
        return 0
    for name, own in episodes(entries):
        print(name)
        for entry in own:
            fields = _flat(entry)
            head = f"{fields['time']}  {entry.event:7} {fields['kind']:6} {fields['engine']:28}"
            print(f"  {head} {entry.took_s:7.2f} s  {entry.says}")
    return 0


def _flat(entry: Entry) -> dict[str, object]:
    action = entry.action
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.at.wall)),
        "plan": entry.plan,
        "event": entry.event,
        "step": entry.step,
        "kind": action.kind if action else "",
        "engine": (action.engine or ", ".join(action.engines)) if action else "",
        "took_s": entry.took_s,
        "says": entry.says,
    }
