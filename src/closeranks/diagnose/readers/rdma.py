"""RDMA as UCX, Mooncake and verbs log it: completions with an error, queue pairs that do not connect, unknown peers."""

from closeranks.diagnose.readers._signatures import Sig, SignatureReader


class Rdma(SignatureReader):
    """What a transfer engine says of its transport. `fault` is the status that the device reported."""

    NAME = "rdma"
    ABOUT = "transfer engines on RDMA (Mooncake, UCX, NIXL): failed completions and connections, peers without metadata"
    SIGNATURES = (
        Sig("rdma_error", "retry counter exceeded", r"(?P<fault>(?:transport|RNR) retry counter exceeded)"),
        Sig("rdma_error", "Failed to modify QP to RT", r"(?P<fault>modify QP to RT[RS])"),
        Sig("rdma_error", "Work Request Flushed", r"(?P<fault>Work Request Flushed)"),
        Sig("rdma_error", "Endpoint timeout", r"(?P<fault>Endpoint timeout)"),
        Sig("rdma_error", "Destination is unreachable", r"(?P<fault>Destination is unreachable)"),
        Sig("transfer_error", "ocal protection error", r"(?=.)"),
        Sig("transfer_error", "emote access error", r"(?=.)"),
        Sig("transfer_error", "NIXL_ERR_BACKEND", r"(?=.)"),
        Sig("transfer_error", "Transfer failed for task", r"(?=.)"),
        Sig("peer_unknown", "metadata not found", r"(?=.)"),
        Sig("peer_unknown", "Failed to find location of", r"(?=.)"),
        Sig("peer_unknown", "Failed to retrieve segment descriptor", r"(?=.)"),
    )


LINE_READERS = (Rdma,)
