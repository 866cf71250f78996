"""Readers, one file per format. A module here defines `LINE_READERS` or `DOCUMENT_READERS`; nothing else lists them.

A line reader (`scan.LineReader`) names the tokens that its lines hold and turns lines into facts. A document reader
(`DocumentReader`) turns a JSON or pickled object into facts, or returns None for an object of another format.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Protocol

from closeranks.diagnose.facts import Fact, Src
from closeranks.diagnose.scan import LineReader


class DocumentReader(Protocol):
    """Reads objects of one format."""

    NAME: str
    ABOUT: str

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """Facts of `found`, or None if it is of another format."""


@cache
def _modules() -> tuple[object, ...]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in names)


def line_readers() -> list[LineReader]:
    """Fresh line readers, for one file."""
    return [make() for module in _modules() for make in getattr(module, "LINE_READERS", ())]


def document_readers() -> list[DocumentReader]:
    """Document readers; they keep no state."""
    return [make() for module in _modules() for make in getattr(module, "DOCUMENT_READERS", ())]
