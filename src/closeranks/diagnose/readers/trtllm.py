# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""TensorRT-LLM's log: iteration lines, transfer timeouts, the hang detector."""

from closeranks.diagnose.readers._signatures import Sig, SignatureReader


class Trtllm(SignatureReader):
    """Python and C++ lines of TensorRT-LLM."""

    NAME = "trtllm-log"
    ABOUT = "TensorRT-LLM log lines: iterations, context transfer timeouts, cache sender errors, hang detector"
    SIGNATURES = (
        Sig("trt_iter", "num_scheduled_requests", r"iter = (?P<iter>\d+).*?num_scheduled_requests: (?P<scheduled>\d+)"),
        Sig("trt_active", "active_requests", r"has (?P<active>\d+) active_requests, scheduled (?P<scheduled>\d+) context"),
        Sig("ctx_transfer_timeout", "context KV cache transfer after", r"Timed out waiting for context KV cache transfer after (?P<ms>\d+)"),
        Sig("ctx_transfer_timeout", "generation KV cache transfer after", r"(?=.)"),
        Sig("cache_sender_error", "Exception in CacheSender", r"(?=.)"),
        Sig("cache_sender_error", "Couldn't find the requested block in the reuse tree", r"(?=.)"),
        Sig("cache_sender_error", "storeContextBlocks: Can not find sequence", r"(?=.)"),
        Sig("cache_sender_error", "CacheReceiver", r"(?i)exception in cachereceiver|error"),
        Sig("hang_detected", "Hang detected after", r"Hang detected after (?P<after>\d+) seconds"),
        Sig("hard_kill", "propagating hard-kill", r"(?=.)"),
        Sig("rank_exception", "Encountered an error in forward function", r"(?=.)"),
    )  # fmt: skip


LINE_READERS = (Trtllm,)
