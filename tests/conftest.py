"""For all tests."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that runs inside a test binds logging to the standard error of that test, which is closed after it."""
    yield
    structlog.reset_defaults()
