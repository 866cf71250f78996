"""The bounds that rules use, in seconds."""

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Bounds of the rules. The defaults name a wedge about ten seconds after its onset."""

    still_s: float = 3.0
    """All main threads without a switch and CPU for so long: one sign. An idle loop that sleeps wakes once a second."""
    still_alone_s: float = 10.0
    """So long, with a second signal, where stacks cannot be read."""
    slow_s: float = 60.0
    """So long where a stack shows a wait for a device or a compiler, which may be work."""
    stalled_suspect_s: float = 4.0
    """Requests are held and none has advanced, in a live loop: look closer."""
    stalled_s: float = 8.0
    """So long, with a second signal, confirms."""
    compile_s: float = 900.0
    """At most so long may ranks compile kernels while requests wait: a first request can take minutes."""
    stalled_unseen_s: float = 60.0
    """At most so long where the engine that computes for this one is not in view, and its pace not known."""
    refused_requests: float = 3.0
    """So many hand-overs that failed, and no token since: look closer."""
    refused_s: float = 6.0
    """So long after the first of them, with requests of our own that fail too, confirms."""
    refused_quiet_s: float = 20.0
    """Without a new failure for so long, nothing is suspected of the old ones."""
    refused_grace_s: float = 30.0
    """For so long after an engine that hands over was away or starting, failures are its restart's: decode looks for
    a lost peer every 5 s, and gives it up after a few times."""
    refused_unseen_s: float = 600.0
    """For so long the engine that hands over may be restarting where it is not in view."""
    unanswered_s: float = 4.0
    """The port accepts and does not answer."""
    heartbeat_s: float = 20.0
    """The scheduler's published heartbeat stands; healthy ones do for 15 s."""
    spinning_s: float = 30.0
    """The loop stands while GPUs are busy at low power."""
    dead_s: float = 2.0
    """A process is gone or a zombie for so long while its engine goes on."""
    dead_unlogged_s: float = 8.0
    """The same where the log, which would say that the engine is being ended, cannot be read."""
    stopped_s: float = 5.0
    """A part of an engine is stopped by a signal for so long."""
    gone_s: float = 30.0
    """All processes are gone, nothing said that this was wanted, and nothing came in their place."""
    ending_s: float = 90.0
    """For so long an engine may take to end after it said that it does."""
    again_s: float = 10.0
    """A confirmed engine that has moved for so long without a break is let go."""
    clear_s: float = 3.0
    """A suspicion ends when nothing has supported it for so long."""


DEFAULT = Limits()
