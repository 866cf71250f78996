# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""gloo and the rendezvous store: timeouts to back-date, dead peers, sizes that do not fit, ports in use."""

from closeranks.diagnose.readers._signatures import Sig, SignatureReader


class Gloo(SignatureReader):
    """gloo's transport errors and torch's store errors."""

    NAME = "gloo"
    ABOUT = "gloo transport errors and torch store errors: timeouts, dead peers, size mismatch, port in use"
    SIGNATURES = (
        Sig("gloo_timeout", "Timed out waiting", r"Timed out waiting (?P<ms>\d+)ms for (?P<side>recv|send)"),
        Sig("gloo_size", "op.preamble.length <= op.nbytes", r"op\.nbytes\. (?P<got>\d+) vs (?P<want>\d+)"),
        Sig("peer_timeout", "Read error", r"Read error \[(?P<address>[\d.:a-fA-F]+)\]:?\d*: Connection timed out"),
        Sig("peer_closed", "Read error", r"Read error \[(?P<address>[\d.:a-fA-F]+)\]:?\d*: (?:Connection reset|Broken pipe)"),
        Sig("peer_closed", "Connection closed by peer", r"Connection closed by peer \[?(?P<address>[\d.:a-fA-F]*?)\]?(?::\d+)?(?:\s|$)"),
        Sig("full_mesh_failed", "connectFullMesh failed", r"(?=.)"),
        Sig("hostname_loopback", "Using the loopback address as fallback", r"(?=.)"),
        Sig("port_in_use", "EADDRINUSE", r"(?:.*?port: (?P<port>\d+))?"),
        Sig("port_in_use", "ddress already in use", r"(?:.*?port[ :]+(?P<port>\d+))?"),
        Sig("store_timeout", "waiting for clients", r"(?:.*?(?P<joined>\d+)/(?P<expected>\d+) clients joined)?"),
        Sig("store_timeout", "DistStoreError", r"(?=.)"),
        Sig("store_timeout", "client socket has timed out", r"(?=.)"),
        Sig("store_timeout", "wait timeout after", r"store->get|timeout after \d+ms, keys"),
        Sig("store_lost", "TCPStore server has shut down", r"(?=.)"),
        Sig("store_lost", "TCPStore.cpp", r"(?:recvValue|sendBytes|recvBytes) failed on SocketImpl"),
    )  # fmt: skip


LINE_READERS = (Gloo,)
