"""`python toy_service.py FOLDER`: a real Service and Engine around toy processes, set up as `closeranks serve` does.

The leader beats and is ready, the rank waits, the gateway beats and floods its log; it ends with a word at SIGTERM.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path

import structlog

from closeranks.lifeline import Heart, end_with_parent
from closeranks.output import make_unblocking
from closeranks.supervise import lines
from closeranks.supervise.engine import Engine, Epoch, Program
from closeranks.supervise.service import Service


def toy(path: Path) -> None:
    """One of the children: what its settings are called says which."""
    end_with_parent()
    heart, ended = Heart(), []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    print(path.name, "is up", flush=True)
    while not ended:
        heart.beat()
        if path.name.startswith("leader"):
            (path.parent / "heartbeat").touch()
            (path.parent / "ready").touch()
        if path.name.startswith("gateway"):
            print("x" * 4000, flush=True)
        time.sleep(0.05)
    print(path.name, "last word", flush=True)


def main(folder: Path) -> int:
    make_unblocking()
    lines.configure(sys.stderr, as_json=False)

    def plan(epoch: Epoch, place: Path) -> list[Program]:
        return [Program(name, "toy_service", {}) for name in ("leader", "rank0")]

    def say(engine: Engine) -> None:
        structlog.get_logger().info("engine", state=engine.state.value, epoch=engine.epoch.number)

    engine = Engine("both", sys.executable, folder / "both", plan, say)
    service = Service([engine], Program("gateway", "toy_service", {}), sys.executable, folder, 10.0, lines.for_people)
    return asyncio.run(service.run())


if __name__ == "__main__":
    given = Path(sys.argv[1])
    if given.suffix == ".json":
        toy(given)
    else:
        sys.exit(main(given))
