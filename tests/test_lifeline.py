"""No child outlives who started it, whenever that one ends."""

import os
import subprocess
import sys

import pytest

from closeranks.lifeline import PARENT

ASKS = "from closeranks.lifeline import end_with_parent; end_with_parent(); print('goes on')"


@pytest.mark.parametrize("given", [{PARENT: str(os.getpid())}, {}, {PARENT: ""}])
def test_it_goes_on_while_its_parent_lives(given: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != PARENT} | given
    ran = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "goes on\n")


def test_a_parent_that_ended_while_it_loaded_is_missed() -> None:
    """It has another parent by then, at both looks: only its starter's own word tells."""
    starter = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    environment = {**os.environ, PARENT: starter.stdout.decode().strip()}
    ran = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "ended while this one started" in ran.stderr
