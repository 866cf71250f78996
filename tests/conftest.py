"""For all tests."""

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine and what else runs on it: no test is decided by it.
settings.register_profile("closeranks", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("closeranks")


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command that runs inside a test binds logging to the standard error of that test, which is closed after it."""
    yield
    structlog.reset_defaults()
