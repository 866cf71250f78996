"""Whether the answer to a request of our own holds a token.

A status does not tell: a proxy's page of HTML comes with 200, and so does a completion without choices, or one that
the engine gave up.
"""

from collections.abc import Mapping
from typing import Any

_FAILED = ("abort", "error")


def generated(said: Any) -> bool:
    """An answer of SGLang's `/generate`, decoded: it was not given up, and a token came."""
    if not isinstance(said, Mapping):
        return False
    meta = said.get("meta_info")
    count = meta.get("completion_tokens") if isinstance(meta, Mapping) else None
    return not given_up(said) and bool(count or said.get("text") or said.get("output_ids"))


def given_up(said: Mapping[str, Any]) -> bool:
    """An answer of SGLang's `/generate` whose request was ended without being done."""
    meta = said.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, Mapping) else None
    return isinstance(reason, Mapping) and reason.get("type") in _FAILED


def completed(said: Any) -> bool:
    """An answer of `/v1/completions`, decoded: it has a choice, which was not given up, and a token. The token may
    show in the usage alone: the end of the text is one, without characters."""
    choices = said.get("choices") if isinstance(said, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping) or first.get("finish_reason") in _FAILED:
        return False
    usage = said.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return bool(first.get("text") or count)
