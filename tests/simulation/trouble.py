"""Single things that go wrong at an instant: each a function of the run, chosen by the weather."""

from collections.abc import Callable
from typing import Any


def kill(run: Any, life: Any) -> None:
    life.engine.kill()


def kill_prefill(run: Any, life: Any) -> None:
    prefill = [e for e in run.network.engines.values() if e.role == "prefill" and e.life.alive]
    if prefill:
        run.world.random.choice(prefill).kill()


def stall(run: Any, life: Any) -> None:
    """A rank stands still for a while: a slow step, no fault."""
    rank = run.world.random.randrange(len(life.ranks))
    life.stall(rank, run.world.random.random() * 3)


def hang(run: Any, life: Any) -> None:
    """A rank stands still for good."""
    life.stall(run.world.random.randrange(len(life.ranks)), 10_000.0)


def pause(run: Any, life: Any) -> None:
    """The leader's process is stopped, then continued."""
    life.paused_until = run.world.now + run.world.random.choice([0.3, 2.0, 7.0])
    life.excused_until = life.paused_until + 8.0


def mischief(kind: str) -> Callable[[Any, Any], None]:
    """What a rank of the engine does in its next step."""

    def act(run: Any, life: Any) -> None:
        life.mischief = kind

    return act


def partition(run: Any, life: Any) -> None:
    until = run.world.now + run.world.random.choice([0.5, 3.0, 8.0])
    for p, d in run.network.pairs:
        if life.engine.name in (p, d):
            run.world.partitions[d, p] = run.world.partitions[p, d] = until


def gateway(run: Any, life: Any) -> None:
    """The gateway's process dies with all its requests; another one starts."""
    run.gateway.die()
    run.new_gateway()


def cut_gateway(run: Any, life: Any) -> None:
    """No message between the gateway and one engine for a while, and nobody is told."""
    run.network.cuts[life.engine.name] = run.world.now + run.world.random.choice([1.0, 4.0, 7.0])


def version(run: Any, life: Any) -> None:
    """The engine comes back with other weights."""
    life.engine.odd = not life.engine.odd
    life.engine.kill()


def unlike(run: Any, life: Any) -> None:
    """The engine comes back with one rank that differs."""
    life.engine.unlike = True
    life.engine.kill()


def broken(run: Any, life: Any) -> None:
    """The engine comes back with a rank that cannot load."""
    life.engine.broken = True
    life.engine.kill()


def drain(run: Any, life: Any) -> None:
    life.drain()


TROUBLES: dict[str, Callable[[Any, Any], None]] = {
    "kill": kill,
    "kill_prefill": kill_prefill,
    "stall": stall,
    "hang": hang,
    "pause": pause,
    "raise": mischief("raise"),
    "digest": mischief("digest"),
    "short": mischief("short"),
    "partition": partition,
    "gateway": gateway,
    "cut_gateway": cut_gateway,
    "version": version,
    "unlike": unlike,
    "broken": broken,
    "drain": drain,
}
