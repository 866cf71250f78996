# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""DeepEP's barrier matrix: value 1024 in column t means that local peer t has not arrived; 0 arrived; < 0 a barrier ahead."""

from collections.abc import Iterable

from msgspec.structs import replace

from closeranks.diagnose.facts import Event, Fact
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader


class DeepEp(SignatureReader):
    """Lines of the device-side time-out and of its host side."""

    NAME = "deepep"
    ABOUT = "DeepEP time-outs: barrier matrix, forwarder and receiver lines, host side"
    SIGNATURES = (
        Sig("deepep_cell", "DeepEP timeout check failed", r"rank = (?P<rank>\d+), thread = (?P<peer>\d+), value = (?P<value>-?\d+)"),
        Sig("deepep_remote", "timeout (RDMA meta)", r"RDMA: (?P<rdma>\d+), nvl: (?P<nvl>\d+), src RDMA(?: lane)?: (?P<remote>\d+)"),
        Sig("deepep_remote", "NVL receiver timeout", r"RDMA: (?P<rdma>\d+), nvl: (?P<nvl>\d+), src RDMA: (?P<remote>\d+)"),
        Sig("deepep_host_timeout", "DeepEP error: timeout", r"timeout \((?P<where>[\w ]+)\)"),
        Sig("deepep_host_timeout", "DeepEP error: CPU recv timeout", r"(?=.)"),
    )  # fmt: skip

    def line(self, line: Line) -> Iterable[Fact]:
        """Events of the line; cells say which pod's, where a collector names it: indices are local to a node."""
        for fact in super().line(line):
            if isinstance(fact, Event) and fact.kind == "deepep_cell" and line.origin:
                fact = replace(fact, data={**fact.data, "node": line.origin})
            yield fact


LINE_READERS = (DeepEp,)
