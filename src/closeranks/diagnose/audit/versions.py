"""Versions as engines print them (`0.5.13.post1`, `v0.5.14-cu126`, `0.32.0+cpu`), compared."""

import re

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:[.-]?(a|b|rc|dev|post)[.-]?(\d+))?", re.IGNORECASE)
_STAGE = {"dev": -4, "a": -3, "b": -2, "rc": -1, "": 0, "post": 1}


def key(version: str) -> tuple[tuple[int, ...], int, int] | None:
    """What two versions are compared by; None for text that is no version. `+cpu` and `-cu126` are ignored."""
    match = _VERSION.match(version.strip())
    if match is None:
        return None
    numbers = [int(n) for n in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _STAGE[(match[2] or "").lower()], int(match[3] or 0)


def within(version: str, ranges: str) -> bool | None:
    """Whether `version` meets every part of `>=0.5.9,<0.5.16`; None when the version cannot be read.

    Raises `ValueError` for ranges that are none.
    """
    own = key(version)
    if own is None:
        return None
    for part in filter(None, (piece.strip() for piece in ranges.split(","))):
        match = re.fullmatch(r"(<=|>=|==|!=|<|>)\s*(\S+)", part)
        bound = key(match[2]) if match else None
        if match is None or bound is None:
            raise ValueError(f"no version range: {part!r}")
        holds = {
            "<": own < bound,
            "<=": own <= bound,
            ">": own > bound,
            ">=": own >= bound,
            "==": own == bound,
            "!=": own != bound,
        }[match[1]]
        if not holds:
            return False
    return True
