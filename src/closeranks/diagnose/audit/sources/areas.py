"""Which area of an engine a file belongs to, so that a patch can be named by what it touches."""

import re

_AREAS = (
    ("index-K", r"index_?k|indexer|/nsa/|/dsa/|nsa_|dsa_|lightning"),
    ("HiCache", r"hicache|hiradix|hi_|pool_host|memory_pool_host|cache_controller|hybrid_cache|kv_offload|offload"),
    ("disaggregation", r"disaggregation/|kv_transfer|nixl|mooncake|transfer_engine|connector"),
    ("parser", r"function_call|tool_parser|reasoning|/parser/|parsers?\.py|encoding_ds|jinja|chat_template|detector"),
    ("overlap", r"overlap"),
    ("collectives", r"parallel_state|distributed/|communicator|all_?reduce|shm_broadcast|pynccl"),
    ("speculative", r"speculative|spec_decode|eagle|mtp|draft"),
    ("scheduler", r"managers/|scheduler|/v1/core/|/v1/engine/|request_receiver"),
    ("cache", r"mem_cache|radix|kv_cache|block_pool|memory_pool"),
    ("sampling", r"sampl|logits"),
    ("attention", r"attention|flashinfer|flashmla|triton_ops"),
    ("model", r"/models?/|layers/|quantization|moe"),
    ("frontend", r"entrypoints/|tokenizer|openai|http_server|serving_"),
)


AREAS = frozenset([*(name for name, _ in _AREAS), "other"])
"""All names of areas."""


def area_of(path: str, changed_text: str = "") -> str:
    """The area by path; lines of a diff that speak of index-K or HiCache win, because a patch may hide anywhere."""
    if changed_text:
        for area, pattern in _AREAS[:2]:
            if re.search(pattern, changed_text, re.IGNORECASE):
                return area
    for area, pattern in _AREAS:
        if re.search(pattern, path.lower()):
            return area
    return "other"
