"""Kubernetes pods: the pod is deleted, its controller makes the next. A pod without a controller is left alone.

A pod keeps its name in a StatefulSet, so a life is told by the pod's uid, which is looked at right before the delete.
Deletion is never forced: a forced one leaves the API at once while the processes may run on beside their successors.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from closeranks.supervise.platforms.base import PlatformError, Ran, Runner, Seen, StillAlive, Target, run

CALL_S = 20.0
LOOK_S = 1.0
GRACE_S = 2


class Kubernetes:
    """Drives `kubectl`; an engine's unit is NAMESPACE/POD. Needs get and delete on pods."""

    name: ClassVar[str] = "kubernetes"
    tried: ClassVar[bool] = False

    def __init__(self, runner: Runner = run, sleep: Callable[[float], None] = time.sleep) -> None:
        self._run, self._sleep = runner, sleep

    def find(self, seen: Seen) -> Target:
        """The pod and its uid. Raises PlatformError for one that nobody would start again."""
        namespace, _, name = seen.unit.partition("/")
        if not name:
            raise PlatformError(f"{seen.name}: its pod is not known (NAMESPACE/POD)")
        said = self._call("get", "pod", name, "--namespace", namespace, "--output", "json")
        if said.code:
            raise PlatformError(f"{seen.unit}: {said.err.strip()}")
        metadata: dict[str, Any] = json.loads(said.out)["metadata"]
        owners = [f"{o['kind']} {o['name']}" for o in metadata.get("ownerReferences", []) if o.get("controller")]
        detail = "" if owners else f"pod {seen.unit} has no controller: deleted, it would not come back"
        wanted = f"somebody is deleting pod {seen.unit}" if metadata.get("deletionTimestamp") else ""
        return Target(
            name=seen.name,
            platform=self.name,
            processes=seen.processes,
            unit=seen.unit,
            life=metadata["uid"],
            detail=detail,
            wanted=wanted,
        )

    def is_running(self, target: Target) -> bool:
        """Whether the pod of that uid still is in the API; it leaves when the kubelet has ended its processes."""
        return self._uid(target) == target.life

    def end_tree(self, target: Target, deadline_s: float) -> int:
        """Delete the pod of that uid with a short grace period, and wait until it is gone."""
        if target.detail:
            raise PlatformError(target.detail)
        until = time.monotonic() + deadline_s
        if not self.is_running(target):
            return 0
        said = self._call(*_delete(target))
        if said.code and not any(word in said.err for word in ("NotFound", "not found")):
            raise PlatformError(f"pod {target.unit} could not be deleted: {said.err.strip()}")
        while self.is_running(target):
            if time.monotonic() > until:
                raise StillAlive([p.pid for p in target.processes], deadline_s)
            self._sleep(LOOK_S)
        return max(1, len(target.processes))

    def start(self, target: Target, token: str, folder: Path) -> str:
        """Nothing to do: the controller has seen the deletion. Whether the next pod serves is for the checks after."""
        return f"the controller of pod {target.unit} starts the next one"

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        """Not known: the controller tries again, and a Deployment's next pod has another name."""
        return ""

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        """The delete; the start has no command."""
        return ("kubectl", *_delete(target)) if step == "end" else ()

    def _uid(self, target: Target) -> str:
        namespace, _, name = target.unit.partition("/")
        said = self._call("get", "pod", name, "--namespace", namespace, "--output", "jsonpath={.metadata.uid}")
        if said.code and "NotFound" not in said.err and "not found" not in said.err:
            raise PlatformError(f"{target.unit}: {said.err.strip()}")
        return said.out.strip() if not said.code else ""

    def _call(self, *words: str) -> Ran:
        return self._run(("kubectl", *words), CALL_S)


def _delete(target: Target) -> tuple[str, ...]:
    namespace, _, name = target.unit.partition("/")
    return ("delete", "pod", name, "--namespace", namespace, f"--grace-period={GRACE_S}", "--wait=false")
