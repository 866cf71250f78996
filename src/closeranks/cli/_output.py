"""Writing what a command has to say: to standard output or a file, and in one piece. Where it cannot be written, that
is said and is no finding."""

import os
import sys
from pathlib import Path


class NotWritten(Exception):
    """The output could not be written; says where and why."""


def write(text: str, file: str | None = None) -> None:
    """`text` to `file` (UTF-8), or to standard output with characters that it cannot show as escapes.

    Raises `NotWritten`, and BrokenPipeError when whoever read standard output has left.
    """
    if file is not None:
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as e:
            raise NotWritten(f"{file} cannot be written: {e.strerror}") from e
        return
    if sys.stdout is None:
        raise NotWritten("standard output is closed")
    shown = text.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8")
    try:
        sys.stdout.write(shown)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer cannot be written at exit either
        raise NotWritten(f"standard output cannot be written: {e.strerror}") from e
