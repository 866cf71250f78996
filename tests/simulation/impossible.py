"""The four tables of `coverage`: their states, their events, and why a pair cannot come up."""

from collections.abc import Callable

from closeranks.engine.leader import rooms as r
from tests.simulation import attempts

PREFILL_ONLY = (r.PROMISED, r.QUEUED, r.SENDING, r.HANDED)
DECODE_ONLY = (r.RESERVED, r.CHECKING)
ROOM_STATES = [r.NEW, *r.OPEN, r.ENDED]
ROOM_EVENTS = [
    r.SUBMIT, r.GRANT, r.ADMIT, r.RESERVE, r.COMPUTED, r.JOIN, r.SETTLED, r.ARRIVED, r.CHECKED,
    r.FINISH, r.ACK, r.ABORT, r.DEADLINE, r.PEER_END, r.RETRACT, r.BAD, r.FAULT,
]  # fmt: skip
OWN = (r.ADMIT, r.RESERVE, r.COMPUTED, r.JOIN, r.FINISH, r.RETRACT, r.ACK)


def room(state: str, event: str) -> str:
    if event in OWN and (state, event) not in r.TABLE:
        return "the leader's own move, made in the states of the table only"
    if event in (r.DEADLINE, r.FAULT) and state in (r.NEW, r.ENDED):
        return "no open room"
    if event == r.SUBMIT and state == r.HANDED:
        return ""
    if event == r.GRANT and state in (*DECODE_ONLY, r.RUNNING):
        return "grants go to prefill, the state is another engine's"
    if event == r.ARRIVED and (state in PREFILL_ONLY or state == r.PREFILL):
        return "arrivals go to decode, the state is prefill's"
    if event == r.ARRIVED and state in (r.NEW, r.WAITING):
        return "answers a grant, and nothing was granted"
    if event == r.CHECKED and state not in (r.CHECKING, r.ENDED):
        return "answers a check; running needs every rank's answer"
    if event == r.SETTLED and state not in (r.PREFILL, r.SENDING, r.ENDED):
        return "answers a send; handed needs every rank's answer"
    if event == r.BAD and state not in (r.PREFILL, r.SENDING, r.CHECKING, r.ENDED):
        return "answers a send or a check"
    return ""


PAGE_STATES = ["free", "owned", "cached", "quarantined"]
PAGE_EVENTS = [
    "take", "share", "left by one of its users", "left whole", "left unfinished", "publish", "evict", "quarantine",
    "proof", "write",
]  # fmt: skip
PAGE = {
    "take": (("free",), "only free pages are taken"),
    "share": (("owned", "cached"), "only pages found in the cache are shared"),
    "left by one of its users": (("owned",), "has no user"),
    "left whole": (("owned",), "has no user"),
    "left unfinished": (("owned",), "has no user"),
    "publish": (("owned",), "has no user"),
    "evict": (("cached",), "only cached pages without a user are evicted"),
    "quarantine": (("owned",), "has no user"),
    "proof": (("quarantined",), "is not in quarantine"),
    "write": (("owned", "quarantined"), "law 4: such a write is a violation"),
}


def page(state: str, event: str) -> str:
    states, why = PAGE[event]
    return "" if state in states else why


EPOCH_STATES = ["starting", "ready", "draining", "faulted"]
EPOCH_EVENTS = [
    "tick", "joined", "report", "sent", "checked", "dropped", "progress", "compiled", "rankfault", "attach", "submit",
    "abort", "drain", "hello", "grant", "arrived", "end", "quiet", "beat",
]  # fmt: skip


def epoch(state: str, event: str) -> str:
    if state == "starting" and event in ("report", "sent", "checked", "dropped", "progress", "compiled"):
        return "answers the leader, which has said nothing yet"
    if state == "starting" and event == "arrived":
        return "comes over a link that decode dials once it is ready"
    if state in ("ready", "draining") and event == "joined":
        return "ready when the last rank has joined; each joins once"
    return ""


def resume(state: str, event: str) -> str:
    if state == "gone" and event not in ("of another attempt", "late charge"):
        return "not in the table"
    if state == "waiting" and event not in ("of another attempt", "late charge", "deadline", "client leaves"):
        return "runs nowhere"
    if state == "complete":
        return "the last token and the end come in one message"
    if event == "busy" and state != "placed":
        return "answers the submit, before any token"
    if state == "placed" and event == "known token":
        return "an attempt starts behind all known tokens"
    if state == "placed" and event == "missing too long":
        return "nothing is known to be missing"
    if state == "spoke" and event == "missing too long":
        return "nothing is known to be missing"
    return ""


Why = Callable[[str, str], str]
TABLES: list[tuple[str, list[str], list[str], Why]] = [
    ("room", ROOM_STATES, ROOM_EVENTS, room),
    ("page", PAGE_STATES, PAGE_EVENTS, page),
    ("epoch", EPOCH_STATES, EPOCH_EVENTS, epoch),
    ("resume", attempts.STATES, attempts.EVENTS, resume),
]
