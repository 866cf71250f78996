"""What besets a deployment: a run passes through one weather after another, so that every seed meets most of them."""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Weather:
    """Chances per message or per transfer, rates per simulated second."""

    name: str
    loss: float = 0.01
    """Of a message between engines; a twentieth of it breaks a gateway's connection."""
    leak: float = 0.0
    """Of a message between a gateway and an engine, either way: lost, doubled or late, and nobody is told."""
    meddling: float = 0.003
    """Submits after which somebody else ends the room."""
    double: float = 0.01
    slow: float = 0.05
    """Messages that take up to half a second."""
    late: float = 0.03
    """Writes that take up to `lateness_s`."""
    lateness_s: float = 3.0
    failing: float = 0.004
    """Transfers that fail, half written."""
    sticking: float = 0.002
    """Transfers that never settle."""
    damage: float = 0.004
    """Pages whose content changes on the way."""
    aborts: float = 0.15
    """Requests whose client leaves."""
    mass: float = 0.05
    """Bursts that leave together."""
    gap_s: float = 0.06
    """Mean time between clients."""
    long: bool = False
    """Long prompts and outputs: pages become scarce."""
    lone: float = 0.03
    poison: float = 0.0
    """Requests that make every rank raise that computes them."""
    grammars: float = 0.03
    """Requests whose tokens a grammar constrains; a rank compiles it first, or cannot."""
    ambush: float = 0.05
    """Submits whose room something befalls in a state drawn beforehand (see `ambush.py`)."""
    brutal: float = 0.0
    """Ambushes that strike the engine, too."""
    echo: float = 0.05
    """Messages between leaders that are said again when their room has reached a state drawn beforehand."""
    unheard: float = 0.0
    """Submits that are lost, and nobody is told."""
    careless: bool = False
    """Gateways pair engines that do not match."""
    troubles: dict[str, float] = field(default_factory=dict)
    """Trouble (see `trouble.py`) -> times a second."""


ALWAYS = {
    "strike": 3.0,
    "short": 0.05,
    "digest": 0.03,
    "hang": 0.02,
    "version": 0.02,
    "kill_prefill": 0.03,
    "crowd": 0.1,
}
"""Troubles that come in every weather."""
FAIR = Weather("fair", failing=0.0, sticking=0.0, damage=0.0)
WEATHERS = [
    FAIR,
    Weather("abort storm", aborts=0.8, mass=0.7, gap_s=0.02),
    Weather("tight", long=True, gap_s=0.03, aborts=0.1, ambush=0.3),
    Weather("tight storm", long=True, gap_s=0.03, aborts=0.6, mass=0.3, late=0.3, lateness_s=1.0, ambush=0.3),
    Weather("slow writers", late=0.5, lateness_s=4.0, aborts=0.6, gap_s=0.04),
    Weather("failing transfers", failing=0.3, late=0.1),
    Weather("torn writes", failing=0.4, late=0.4, lateness_s=2.0, aborts=0.5, gap_s=0.02),
    Weather("torn writes, pages scarce", failing=0.3, late=0.7, lateness_s=4.0, long=True, gap_s=0.03),
    Weather("stuck transfers", sticking=0.2, aborts=0.3),
    Weather("damaged pages", damage=0.15),
    Weather("loss", loss=0.2, double=0.05, slow=0.1),
    Weather("some loss", loss=0.06, gap_s=0.04, aborts=0.3),
    Weather("echoes", double=0.4, slow=0.3, aborts=0.4, echo=0.1),
    Weather("broken links", troubles={"partition": 0.5}, late=0.1, aborts=0.3),
    Weather("sundered pairs", gap_s=0.04, aborts=0.3, late=0.1, troubles={"sunder": 1.5}),
    Weather("lost devices", troubles={"lose_device": 0.8}),
    Weather("lost devices, late", troubles={"lose_device": 0.8, "kill": 0.1}, late=0.4, aborts=0.4, gap_s=0.03),
    Weather("restarts", troubles={"kill": 0.6, "raise": 0.6}, late=0.4, lateness_s=2.0),
    Weather("writers die", troubles={"kill_prefill": 1.0}, late=0.9, lateness_s=8.0, gap_s=0.02),
    Weather("writers die, pages scarce", troubles={"kill_prefill": 1.0}, late=0.9, lateness_s=6.0, long=True),
    Weather("faults", troubles={"raise": 2.0, "digest": 1.0, "short": 1.0}, slow=0.2),
    Weather("liars", troubles={"digest": 1.5, "short": 1.5}, gap_s=0.03),
    Weather("stalls", troubles={"stall": 0.8, "hang": 0.4, "pause": 0.3}),
    Weather("gateways die", troubles={"gateway": 0.2, "cut_gateway": 0.8}, aborts=0.4),
    Weather("leaks", leak=0.3, meddling=0.1, aborts=0.3, loss=0.1),
    Weather(
        "leaks and restarts",
        leak=0.3,
        loss=0.2,
        troubles={"kill": 0.8, "raise": 1.0, "cut_gateway": 0.4, "hang": 0.2},
    ),
    Weather("other versions", careless=True, troubles={"version": 0.5, "unlike": 0.2, "broken": 0.2, "kill": 0.2}),
    Weather("drains", troubles={"drain": 2.0, "raise": 0.6, "kill": 0.2}, gap_s=0.03, aborts=0.4),
    Weather("lone requests", lone=0.4, gap_s=0.03, aborts=0.3),
    Weather("poison", poison=0.05, slow=0.3),
    Weather("poisonous crowds", gap_s=0.3, troubles={"crowd": 4.0}),
    Weather("grammars", grammars=0.5, aborts=0.3),
    Weather("ambushes", ambush=0.3, brutal=0.4, slow=0.3, gap_s=0.03),
    Weather("words out of season", echo=0.3, ambush=0.3, slow=0.3, gap_s=0.03),
    Weather("unheard", unheard=0.2, slow=0.3, ambush=0.1, brutal=0.3),
    Weather("traps", troubles={"trap": 6.0}, gap_s=0.03, late=0.1),
    Weather("strikes", troubles={"strike": 12.0}, gap_s=0.03),
    Weather("strikes in a leak", troubles={"strike": 9.0, "cut_gateway": 0.3}, leak=0.1, slow=0.2),
    Weather("thin air", troubles={"thin": 0.8, "strike": 3.0, "cut_gateway": 0.4}, gap_s=0.03, leak=0.1),
    Weather(
        "everything",
        loss=0.05,
        double=0.05,
        late=0.2,
        failing=0.03,
        damage=0.02,
        aborts=0.5,
        mass=0.3,
        troubles={"kill": 0.15, "stall": 0.2, "partition": 0.1, "digest": 0.1, "raise": 0.1, "gateway": 0.05},
    ),
]


def mixed(a: Weather, b: Weather) -> Weather:
    """Both at once: of each chance the greater, of troubles the sum."""
    values = {}
    for each in fields(Weather):
        x, y = getattr(a, each.name), getattr(b, each.name)
        if each.name == "name":
            values["name"] = f"{x}, {y}"
        elif each.name == "troubles":
            values["troubles"] = {kind: x.get(kind, 0.0) + y.get(kind, 0.0) for kind in {**x, **y}}
        else:
            values[each.name] = min(x, y) if each.name == "gap_s" else max(x, y)
    return Weather(**values)
