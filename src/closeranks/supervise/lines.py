"""Log lines of a service in one shape: its supervisor's own, those of libraries under it, and its children's."""

import logging
from typing import TextIO

import structlog

LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception"})
_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]
_FOR_PEOPLE = structlog.dev.ConsoleRenderer(colors=False)


def configure(stream: TextIO, as_json: bool) -> None:
    """Once per process."""
    render: structlog.typing.Processor = structlog.processors.JSONRenderer() if as_json else _FOR_PEOPLE
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *_SHARED, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=_SHARED))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def for_people(found: dict[str, object]) -> str:
    """An event that a child wrote as JSON, as `configure` writes ours. Total: whatever its fields are."""
    event: dict[str, object] = {name: value for name, value in found.items() if not name.startswith("_")}
    for name in ("exc_info", "stack_info"):  # the renderer would look for an exception here
        event.pop(name, None)
    for name in ("timestamp", "exception", "stack"):
        if not isinstance(event.get(name), str):
            event.pop(name, None)
    level = event.pop("level", None)
    if isinstance(level, str) and level in LEVELS:
        event["level"] = level
    return str(_FOR_PEOPLE(None, "", event))
