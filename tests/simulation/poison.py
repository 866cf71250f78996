"""Requests that fell every engine that computes them: what they are known by, and when they strike."""

from typing import Any

from closeranks.protocol import Step

AT_ONCE, LATER = 1000, 1001
"""First token of a prompt whose first row, or whose first row behind the prompt, makes the rank raise."""
POISONS = [AT_ONCE, LATER]


def poisoned(slots: dict[int, Any], step: Step) -> bool:
    """Does a row of `step` make the rank raise that has these slots?"""
    for row in step.rows:
        if row.begin is not None:
            first, behind = row.begin.tokens[0], row.start >= row.begin.prompt_length
        else:
            slot = slots[row.slot]
            first, behind = slot.tokens[0], row.count == 1
        if first == AT_ONCE or (first == LATER and behind and row.sample):
            return True
    return False
