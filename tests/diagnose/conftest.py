"""A rule that fails is only a note to users; here it is a failure."""

from collections.abc import Iterator

import pytest

from closeranks.diagnose import judge, rules
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import Finding


@pytest.fixture(autouse=True, scope="session")
def no_rule_fails() -> Iterator[None]:
    def apply(scene: Scene) -> list[Finding]:
        found = rules.apply(scene)
        failed = [note for note in scene.notes if rules.FAILED in note]
        assert not failed, failed
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "apply", apply)
        yield
