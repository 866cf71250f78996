"""Requests that fell every engine that computes them: what they are known by, and when they strike."""

from collections.abc import Iterable
from typing import Any

from closeranks.protocol import Row

AT_ONCE, LATER = 1000, 1001
"""First token of a prompt whose first row, or whose first row behind the prompt, makes the rank raise."""
POISONS = [AT_ONCE, LATER]


def poisoned(slots: dict[int, Any], rows: Iterable[Row]) -> bool:
    """Does one of these rows make the rank raise that has these slots?"""
    for row in rows:
        if row.begin is not None:
            first, behind = row.begin.tokens[0], row.start >= row.begin.prompt_length
        else:
            slot = slots[row.slot]
            first, behind = slot.tokens[0], row.count == 1
        if first == AT_ONCE or (first == LATER and behind and row.sample):
            return True
    return False
