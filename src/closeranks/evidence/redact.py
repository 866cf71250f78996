# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Redaction: what must never leave a machine inside a report, and the one function that takes it out.

Reports are built from parsed fields, so raw text rarely reaches them. This is the second line: every string that a
report prints passes through `redact`, and so does evidence that is stored in a bundle.
"""

import re

MASK = "[redacted]"

# A value after a word that announces a secret: `--api-key X`, `HF_TOKEN=X`, `"password": "X"`, `Authorization: Bearer X`.
_NAMED = re.compile(
    r"""(?ix)
    (?P<name> (?: [\w.-]* (?: api[_-]?key | apikey | secret | passw(?:or)?d | passwd | credential | private[_-]?key
        | access[_-]?key | auth[_-]?token | bearer[_-]?token | (?<![a-z]) hf[_-]?token | [_-]token (?![a-z]) | session[_-]?cookie | cookie
        ) [\w-]* | \b authorization \b | (?<![\w-]) token (?!s) \b (?= \s* [=:] \s* ["']? [A-Za-z_] ) ) ["']? )
    (?P<sep> \s* [=:] \s* | \s+ (?= \S ) )
    (?P<value> (?: bearer | basic ) \s+ [^\s"',;]+ | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [^\s"',;)\]}]+ )
    """
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_SHAPES = re.compile(
    r"""(?x)
    \b sk-[A-Za-z0-9_-]{8,} | \b (?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{16,} | \b github_pat_\w{20,} | \b glpat-[\w-]{12,}
    | \b hf_[A-Za-z0-9]{12,} | \b nvapi-[\w-]{12,} | \b (?:AKIA|ASIA)[A-Z0-9]{12,} | \b AIza[\w-]{20,}
    | \b xox[abposr]-[\w-]{8,} | \b eyJ[\w-]{8,}\.[\w-]{6,}(?:\.[\w-]*)? | \b (?:r8|pk|rk)_(?:live|test)?_?[A-Za-z0-9]{16,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """
)
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@:]+(?::[^\s/@]*)?@")
# What a request carried. The value runs to the end of the line: a prompt may hold any quote.
_PROMPT = re.compile(
    r"(?i)\b(origin_input_text|input_text|input_ids|origin_input_ids|output_ids|prompt_token_ids|prompt|messages"
    r"|text_prompt|decoded_text|image_data)(['\"]?\s*[=:]\s*).*"
)
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")


def redact(text: str) -> str:
    """`text` without keys, tokens, passwords, credentials in addresses, and prompts. Linear, idempotent."""
    text = _SHAPES.sub(MASK, text)
    text = _BEARER.sub(lambda m: f"{m[1]} {MASK}", text)
    text = _NAMED.sub(lambda m: m[0] if m["value"].strip("\"'") in ("", MASK) else f"{m['name']}{m['sep']}{MASK}", text)
    text = _USERINFO.sub(lambda m: f"{m[1]}{MASK}@", text)
    return _PROMPT.sub(lambda m: f"{m[1]}{m[2]}{MASK}", text)


def redact_addresses(text: str) -> str:
    """IPv4 addresses as `10.x.x.1` → `ip-1`, `ip-2`, …: the same address keeps its name, so the picture stays whole."""
    names: dict[str, str] = {}
    return _ADDRESS.sub(lambda m: names.setdefault(m[0], f"ip-{len(names) + 1}"), text)
