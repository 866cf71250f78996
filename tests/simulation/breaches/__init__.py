"""Planted breaches: each patches one production function as somebody might get it wrong, and must be found out.

`python -m tests.simulation.breaches` prints which seeds find which breach; `LISTED` is the list.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.breaches import gateway, leader, pairs
from tests.simulation.breaches.breach import Breach
from tests.simulation.run import Run

LISTED: dict[str, Breach] = {breach.name: breach for breach in (*leader.BREACHES, *pairs.BREACHES, *gateway.BREACHES)}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """One breach in place."""
    breach = LISTED[name]
    saved = breach.cls.__dict__[breach.attribute]
    setattr(breach.cls, breach.attribute, breach.function)
    try:
        yield
    finally:
        setattr(breach.cls, breach.attribute, saved)


def found_by(name: str, seed: int, events: int) -> tuple[str, int]:
    """What the simulation says of the breach with this seed (empty: nothing), and after how many events."""
    with planted(name):
        run = Run(seed, events)
        try:
            run.go()
        except Exception as error:  # noqa: BLE001 - any failure finds the breach; its text is the result
            return f"{type(error).__name__}: {error}", run.world.events
    return "", run.world.events
