"""`closeranks guard URL`: a streaming proxy before an OpenAI-compatible endpoint that leaks tool-call markup."""

import argparse
import asyncio
import json
import signal
import sys
from urllib.parse import urlsplit

HELP = "proxy an OpenAI-compatible endpoint: repair leaked tool calls, strip leaked markup, count both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `closeranks guard`."""
    parser.add_argument(
        "url", metavar="URL", help="the endpoint, e.g. http://127.0.0.1:30000 (a path is kept as prefix)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8009, help="port to listen on; 0: any free (default: %(default)s)")
    parser.add_argument(
        "--tool-call-parser",
        default="v4",
        metavar="NAME",
        help="what the model writes: v32, v4, v41, hermes, or SGLang's or vLLM's name of its parser "
        "(default: %(default)s; the DSML ones accept each other's tags)",
    )
    parser.add_argument("--report-only", action="store_true", help="change nothing, count only")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a decoder policy, e.g. text_after=keep; may be given several times (docs/codec.md lists them)",
    )
    parser.add_argument("--metrics-path", default="/metrics", help="where Prometheus scrapes (default: %(default)s)")
    parser.add_argument(
        "--read-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="end an answer after this much silence of the upstream; 0: never (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the start-up line as JSON")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. 2: arguments that make no sense. 3: the port could not be bound."""
    from closeranks.codec.parsers import UnknownParser, dialect_for
    from closeranks.gateway.guard.server import policy_from

    url = urlsplit(args.url)
    if url.scheme not in ("http", "https") or not url.netloc or url.query or url.fragment:
        return _refuse(f"{args.url!r} is no http(s) URL of an endpoint")
    try:
        dialect = dialect_for(args.tool_call_parser)
        policy = policy_from(args.policy)
    except (UnknownParser, ValueError) as error:
        return _refuse(str(error))

    from closeranks.gateway.guard import Guard, Settings, decoders

    settings = Settings(
        upstream=_base(args.url),
        report_only=args.report_only,
        metrics_path=args.metrics_path,
        read_timeout=args.read_timeout or None,
    )
    guard = Guard(settings, decoders(dialect, policy))
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(guard, args))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(guard, args))


def _base(url: str) -> str:
    """The URL to put the client's path behind. `/v1` at its end is taken off: clients send it themselves."""
    return url.rstrip("/").removesuffix("/v1")


async def _serve(guard: object, args: argparse.Namespace) -> int:
    from closeranks.gateway.guard import Guard, GuardServer

    assert isinstance(guard, Guard)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        async with GuardServer(guard, args.host, args.port) as server:
            listening = f"http://{args.host}:{server.port}"
            if args.json:
                line = json.dumps(
                    {"schema": "closeranks.guard/1", "listening": listening, "upstream": guard.settings.upstream}
                )
            else:
                mode = "reports on" if guard.settings.report_only else "guards"
                line = f"{listening} {mode} {guard.settings.upstream}; counters at {args.metrics_path}"
            print(line, flush=True)
            await stop.wait()
    except OSError as error:
        print(f"closeranks guard: cannot listen on {args.host}:{args.port}: {error.strerror or error}", file=sys.stderr)
        return 3
    return 0


def _refuse(text: str) -> int:
    print(f"closeranks guard: {text}", file=sys.stderr)
    return 2
