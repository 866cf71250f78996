"""Single things that go wrong at an instant: each a function of the run, chosen by the weather."""

from collections.abc import Callable
from typing import Any

from closeranks.protocol import Abort, RoomId
from tests.simulation.ambush import TRAP_ACTS, TRAP_KINDS, Trap
from tests.simulation.attempts import state_of
from tests.simulation.network import SILENT_S
from tests.simulation.poison import LATER


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
    life.pause(run.world.random.choice([0.3, 2.0, 7.0]))


def mischief(kind: str) -> Callable[[Any, Any], None]:
    """What a rank of the engine does in its next step."""

    def act(run: Any, life: Any) -> None:
        life.mischief = kind

    return act


def partition(run: Any, life: Any) -> None:
    run.network.isolate(life.engine, run.world.random.choice([0.5, 3.0, 8.0]))


def sunder(run: Any, life: Any) -> None:
    """An engine and one of its peers hear nothing of each other, for more than a lease; gateways reach both."""
    network, random = run.network, run.world.random
    pairs = [pair for pair in network.pairs if life.engine.name in pair]
    if pairs:
        a, b = random.choice(pairs)
        first = random.choice([4.5, 5.2, 5.6, 6.5, 9.0, 14.0])
        ways = random.choice([((a, b), (b, a)), ((a, b),), ((b, a),)])
        for way in ways:
            run.world.partitions[way] = run.world.now + first
        if random.random() < 0.4:  # a word or two get through, then nothing again
            run.world.after(first + random.choice([0.3, 0.6, 1.0]), again, run, a, b)


def again(run: Any, a: str, b: str) -> None:
    if run.loading:
        run.world.partitions[a, b] = run.world.partitions[b, a] = run.world.now + 9.0


def lose_device(run: Any, life: Any) -> None:
    life.nowhere = True


def gateway(run: Any, life: Any) -> None:
    """The gateway's process dies with all its requests; another one starts."""
    run.gateway.die()
    run.new_gateway()


def cut_gateway(run: Any, life: Any) -> None:
    run.network.cut_off(life.engine, run.world.random.choice([1.0, 4.0, 7.0, 12.0]))


def thin(run: Any, life: Any) -> None:
    """Hardly anything that an engine says reaches the gateway for a while."""
    run.network.thin[life.engine.name] = run.world.now + run.world.random.choice([2.0, 7.0])


def trap(run: Any, life: Any) -> None:
    """The next message of some kind finds its leader in another state."""
    random = run.world.random
    run.network.trap = Trap(random.choice(TRAP_KINDS), random.choice(TRAP_ACTS))


def strike(run: Any, life: Any) -> None:
    """A word to a request in some state is lost or late, and something else befalls it before that is noticed."""
    random, by_state = run.world.random, dict[str, list[Any]]()
    for request in run.gateway.table.open.values():
        if request.pair is not None:
            by_state.setdefault(state_of(request), []).append(request)
    if not by_state:
        return
    state = "spoke" if "spoke" in by_state and random.random() < 0.7 else random.choice(sorted(by_state))
    requests = sorted(by_state[state], key=lambda x: x.deadline)
    request = random.choice(requests)
    room = RoomId(request.id, request.generation)
    engine = run.network.engines[request.pair.decode if random.random() < 0.8 else request.pair.prefill]
    what = random.choice(["silence"] * 3 + ["late", "end", "end", "end"] + ["deadline"] * 6 + FOLLOW_UPS)
    if what in ("silence", "end"):  # it takes a while
        request = requests[-1]
        room = RoomId(request.id, request.generation)
    if what == "silence":  # and a word that is still on its way
        run.network.fates[room] = [0.0, SILENT_S + random.random()]
    elif what == "late":  # when the next attempt runs
        run.network.fates[room] = [0.0, 1.0 + random.random()]
    elif what == "end":  # nothing but one word is heard any more, not even its end
        run.network.fates[room] = [0.0, 1.4 + random.random(), -1.0]
    elif what == "deadline":  # a gap when it is near
        late = [x for x in run.gateway.table.open.values() if 0.05 < x.deadline - run.world.now < 1.0]
        run.network.fates.update((RoomId(x.id, x.generation), [0.0]) for x in late)
    else:
        if random.random() < 0.8:
            run.network.fates[room] = [0.0]
        run.world.after(0.005, follow_up, run, engine, request, room, what, 1 + random.randrange(40))


FOLLOW_UPS = ["fault"] * 4 + ["abort"] * 4 + ["kill", "link", "leave", "cut"]


def follow_up(run: Any, engine: Any, request: Any, room: RoomId, what: str, tries: int) -> None:
    """As soon as something is missing, or after so many tries."""
    life, gateway = engine.life, run.gateway
    if not run.loading or not life.alive or not gateway.alive:
        return
    if tries and request.generation == room.generation and state_of(request) in ("placed", "spoke"):
        run.world.after(0.02, follow_up, run, engine, request, room, what, tries - 1)
    elif what == "fault":
        life.raise_in(run.world.random.randrange(len(life.ranks)), in_step=run.world.random.random() < 0.7)
    elif what == "kill":
        engine.kill()
    elif what == "abort":
        life.hear_gateway("operator", Abort(room, "operator"))
    elif what == "link":
        gateway.link_lost(engine.name)
    elif what == "leave" and room.id in gateway.clients:
        gateway.abort(gateway.clients[room.id])
    elif what == "cut":
        run.network.cut_off(engine, 7.0)


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


def crowd(run: Any, life: Any) -> None:
    """Clients that stay, one of them poisonous: all of them are charged for what it does."""
    clients = [run.draw_client() for _ in range(8)]
    for client in clients:
        client.deadline, client.alone = run.world.now + 30.0, False
        client.new = min(24, run.longest - len(client.prompt))
        client.right = client.answer()
    clients[0].make_poison(LATER)
    for client in clients:
        run.gateway.start(client)


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
    "sunder": sunder,
    "lose_device": lose_device,
    "gateway": gateway,
    "cut_gateway": cut_gateway,
    "thin": thin,
    "trap": trap,
    "strike": strike,
    "version": version,
    "unlike": unlike,
    "broken": broken,
    "drain": drain,
    "crowd": crowd,
}
