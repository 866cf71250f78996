"""What a planted breach is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Breach:
    """`law`: of DESIGN, or mechanism of the taxonomy of hangs (M1 to M21). `function` replaces `cls.attribute`."""

    name: str
    law: str
    cls: type
    attribute: str
    function: Callable[..., Any]
