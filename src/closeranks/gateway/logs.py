"""Log lines to stderr: structlog's own and those of the libraries under it, in one form, each bounded.

From `configure` on standard error fails nobody and holds nobody: see `closeranks.output`.
"""

import datetime
import json
import logging
import sys
import traceback

import structlog

from closeranks.gateway.settings import Settings
from closeranks.output import make_unblocking, said_lost

FRAMES = 12
"""Innermost frames of a stack that are logged."""
SAID = 200
"""Characters of an exception's words that are logged."""


def configure(settings: Settings) -> None:
    """Once per process."""
    as_json = settings.log_format == "json"
    make_unblocking(_said_lost if as_json else said_lost)
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _flatten,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(part="gateway")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def where(error: BaseException) -> str:
    """The innermost frames in one line, innermost first: a recursion is no reason for a thousand lines."""
    frames = traceback.extract_tb(error.__traceback__, limit=-FRAMES)
    return " < ".join(f"{f.filename.rpartition('closeranks/')[2]}:{f.lineno} {f.name}" for f in reversed(frames))


def _flatten(logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """An exception as two fields of the line instead of a stack under it."""
    given = event.pop("exc_info", None)
    if given:
        error = given if isinstance(given, BaseException) else given[1] if isinstance(given, tuple) else sys.exception()
        if error is not None:
            event["exception"] = f"{type(error).__name__}: {error}"[:SAID]
            event["stack"] = where(error)
    return event


def _said_lost(lines: int) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    said = {"part": "gateway", "event": "log lines were lost: nobody took them", "lost": lines}
    return json.dumps({**said, "level": "warning", "timestamp": now}) + "\n"
