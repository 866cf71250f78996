# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Redaction: what must never leave a machine inside a report, and the one function that takes it out.

Reports are built from parsed fields, so raw text rarely reaches them. This is the second line: every string that a
report prints passes through `redact`, and so does evidence that is stored in a bundle. Where it cannot be known how far
a secret reaches, too much is masked rather than too little.
"""

import re

MASK = "[redacted]"

# Secrets that are known by their own shape.
_SHAPES = re.compile(
    r"""(?x)
    \b sk-[A-Za-z0-9_-]{8,} | \b (?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{16,} | \b github_pat_\w{20,} | \b gl[a-z]{2,5}-[\w-]{16,}
    | \b (?:hf|gsk|npm|xai|tgp_v1|dop_v1|shpat|dckr_pat|lsv2_[a-z]{2}|fw|nvcf|api_org)_[A-Za-z0-9_]{12,} | \b nvapi-[\w-]{12,}
    | \b (?:AKIA|ASIA|AROA|AIDA|ABIA)[A-Z0-9]{12,} | \b AIza[\w-]{20,} | \b ya29\.[\w-]{8,} | \b pypi-[\w-]{16,} | \b pplx-\w{16,}
    | \b xox[a-z]-[\w-]{8,} | \b xapp-[\w-]{8,} | \b SG\.[\w-]{8,}\.[\w-]{8,} | \b hvs\.[\w-]{16,} | \b (?i:age-secret-key-1)\w{10,}
    | \b eyJ[\w-]{8,}\.[\w-]{6,}(?:\.[\w-]*)? | \b eyJ[\w-]{24,}\.? | \b (?:r8|pk|rk|sk)_(?:live_|test_)?[A-Za-z0-9]{16,}
    | -----BEGIN[ ][A-Z ]{0,40}PRIVATE[ ]KEY[A-Z ]{0,20}-----[\s\S]*?(?:-----END[ ][A-Z ]{0,40}PRIVATE[ ]KEY[A-Z ]{0,20}-----|\Z)
    """
)
_KEY_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----")
_KEY_LINE = re.compile(r"[^\n]*?[A-Za-z0-9+/=]{16,}[^\S\n]*")
# Passwords that stand behind a short option.
_SHELL = re.compile(
    r"\b((?:mysql\w{0,12}|mariadb\w{0,12}|sshpass)\b[^\n]{0,200}?\s-p[^\S\n]?|(?:curl|wget|https?)\b[^\n]{0,300}?\s(?:-u|--user|--proxy-user)[= ]?)"
    r"([^\s\"']+|\"[^\"\n]*\"?|'[^'\n]*'?)"
)
# Addresses that whoever knows them may post to.
_WEBHOOK = re.compile(
    r"(?i)\b((?:hooks\.slack\.com|hooks\.zapier\.com|hooks\.chime\.aws|[\w-]{1,60}\.webhook\.office\.com|api\.telegram\.org"
    r"|[\w.-]{0,60}/(?:api/|open-apis/[\w/]{0,20})?(?:webhooks?|hooks?|incoming|workflows|triggers))/)[^\s\"'<>\\]+"
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+(?!token\b|auth\w*\b)[A-Za-z0-9._~+/=-]{2,}|\b(basic)\s+[A-Za-z0-9._~+/=-]{6,}")
# Who may see an address: `scheme://user:password@`, `scheme://:password@`; the password may hold a slash.
_USERINFO = re.compile(
    r"(?i)([a-z][a-z0-9+.-]{0,20}://)(?:[^\s/@\"'<>]{0,512}@|[^\s/@:\"'<>]{0,256}:(?!\d{1,5}[/?#])[^\s@\"'<>]{1,512}@)(?:[^\s/@\"'<>]{0,256}@)*"
)
_QUERY = re.compile(r"(?i)([?&;]|\\u0026|%3f|%26)([\w.%-]{1,60}?)(=|%3d)([^&\s\"'<>#\\;]+)")
_QUERY_SECRET = re.compile(
    r"(?i)sig(?:nature)?$|key|token|code|auth|cred|secret|pass|pwd|policy|hmac|jwt|ticket|assertion|session"
)

# Names that announce a secret, and what of the name may follow. Three families: of a header the whole line is masked; a
# token may be a number that somebody counted; the rest are secrets whatever they look like.
_ENTRY = re.compile(
    r"(?i)(\bname\\*[\"']?\s{0,8}[:=]\s{0,8}\\*[\"']?[\w.-]{0,60}(?:key|token|secret|passw?o?r?d?|auth|pat|credentials?|cookie)\\*[\"']?\s{0,40},?\s{0,40}"
    r"\\*[\"']?value\\*[\"']?\s{0,8}[:=]\s{0,8})([^\s\"'\\][^\n,}]{0,4000}|\\*\"[^\"\n]{1,4000}|\\*'[^'\n]{1,4000})"
)
_NAMED = re.compile(
    r"""(?ix)
    (?: (?P<header> (?<![a-z]) (?:proxy[-_])? authorization (?![a-z]) | (?<![a-z]) (?:set[-_])? cookie2? (?![a-z]) | (?<![a-z]) x-[a-z-]{0,30}(?:key|token|auth|secret) (?![a-z]) )
      | (?P<token> (?<![a-z]) tokens? (?![a-z]) | (?:auth|access|refresh|bearer|session|security|csrf|xsrf|bot|api) tokens? (?![a-z]) )
      | (?P<secret> (?:api|access|private|secret|account|shared|signing|encryption|license|licence|master|admin|client|ssh|storage|subscription|service|functions?|hmac|consumer|deploy|auth|webhook|master|root|project) [_-]? keys?
          | secrets? | passw(?:or)?ds? | passwd | passphrases? | passcode | credentials? | requirepass | masterauth | session[_-]?cookie | auth[_-]?token
          | (?<![a-z]) (?:pg|db|my|ftp|smtp|redis|user)? pass (?= \\*["']? \s* = | \\*["'] \s* : ) | (?<![a-z]) pwd (?= \\*["']? \s* = | \\*["'] \s* : )
          | (?<![a-z]) auths? (?= \\*["']? \s* [=:] ) | (?<![a-z]) pat (?= \s* = ) | (?<![a-z]) jwt (?= \\*["']? \s* [=:] ) | bearer (?= \\*["'] \s* : )
          | (?<![a-z]) sig (?= \s? = ) | signature (?= = | \\*["'] \s* : \s* \\*["'] ) | webhooks? (?:[_-]?url)? (?= \\*["']? \s* [=:] ) | sas (?= \s* = ) ) )
    (?P<rest> [\w-]{0,40} )
    (?P<close> \\*["'] )? \]?
    (?P<sep> \s{0,8} (?: := | => | [=:]{1,2} ) [^\S\n]* | (?(close) \s{0,8},\s{0,8} | (?!) ) (?= \\*b?["'] ) | [^\S\n]+ (?: (?:is|was|are) [^\S\n]+ )? )
    (?= [^\s] )
    """
)
# Words in front of `_token` that make it one of a tokenizer, not a key.
_TOKENIZER = re.compile(
    r"(?i)(?:eos|bos|pad|unk|cls|sep|mask|image|audio|video|special|next|stop|think|end|start|last|first|max|min|num|per|total|new|in|out|input|output|prefill|decode|generated|cached|prompt|added|one|each|this)[_-]\Z"
)
_PLURAL = re.compile(r"(?i)(?:key|token|secret|password|passwd|passphrase|credential)s[\"']?\s*[=:]")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|apikey|api-key|negotiate)[^\S\n]+(?=\S)")
_HARMLESS = re.compile(r"(?i)[\"']?(?:none|null|true|false|nil|undefined|<redacted>|\*{3,})?[\"']?[,;)\]}]*")
_MASKED = re.compile(r"\[redacted\](?:&|[\"',;)\]} ]*\Z)")
_OF_A_USER = re.compile(r"(?i)auth|access|refresh|bearer|session|security|csrf|xsrf|bot|api")
_VARIABLE = re.compile(r"[A-Z]_\Z")  # HF_TOKEN=1
_COUNT = re.compile(r"[\[({\"']?[-+\d\s.,eE%#]*[\])}\"']?[,;]?")
_STRING = re.compile(r"""[bBrRuUfF]?(?P<q>\\*["'])""")
_NEXT = re.compile(r"""[-&|;<>#\\]|[\w.-]*[=:]|(?P<q>\\*["'])[\w.-]*(?P=q)\s*:""")  # a flag, a command, another name
_GAP = re.compile(r"[^\S\n]*,?[^\S\n]+")
_CLOSES = {"[": "]", "(": ")", "{": "}"}
# What a request carried. The value runs to the end of the line: a prompt may hold any quote.
_PROMPT = re.compile(
    r"(?i)\b(origin_input_text|input_text|input_ids|origin_input_ids|output_ids|prompt_token_ids|prompt|messages"
    r"|text_prompt|decoded_text|image_data)(['\"]?\s*[=:]\s*).*"
)
# What pydantic and tool parsers log of a request without a quote, by these names.
_LOGGED = re.compile(
    r"(?<!\w)(?P<name>input_value|(?:current|previous|delta)_text|model_output)['\"]?(?::|=(?!\s)|\s{0,8}[:=]\s{0,8}(?=['\"\[{]))(?!\s{0,8}(?P=name)\b)[^\S\n]*"
)
_TIME = re.compile(r"\d:\d\d:\d\d")
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")


def redact(text: str) -> str:
    """`text` without keys, tokens, passwords, credentials in addresses, and prompts. Linear, idempotent."""
    text = _SHAPES.sub(MASK, without_logged(text, MASK))
    if "PRIVATE KEY" in text:
        text = _without_key_ends(text)
    text = _WEBHOOK.sub(lambda m: m[1] + MASK, text)
    text = _USERINFO.sub(lambda m: f"{m[1]}{MASK}@", text)
    text = _QUERY.sub(_query, text)
    text = _SHELL.sub(lambda m: m[1] + MASK, text)
    text = _BEARER.sub(lambda m: f"{m[1] or m[2]} {MASK}", text)
    text = _ENTRY.sub(lambda m: m[1] + MASK, text)
    text = _named(text)
    return _PROMPT.sub(lambda m: f"{m[1]}{m[2]}{MASK}", text)


def without_logged(text: str, mask: str) -> str:
    """`text` with `mask` for what is logged of a request by a name and no quote: up to the line's end, and the lines after
    it with the same prefix, as vLLM gives each line of a text that has several."""
    parts: list[str] = []
    at = 0
    while m := _LOGGED.search(text, at):
        end = _line_end(text, m.end())
        begin = text.rfind("\n", at, m.start()) + 1 or at
        prefix = text[begin : m.start()]
        if _TIME.search(prefix):
            while end < len(text) and text.startswith(prefix, end + 1):
                end = _line_end(text, end + 1)
        parts += [text[at : m.end()], mask]
        at = end
    return "".join([*parts, text[at:]])


def _without_key_ends(text: str) -> str:
    """Without the lines of a private key whose beginning was cut off: at most 200 in front of its end."""
    parts: list[str] = []
    at = 0
    for m in _KEY_END.finditer(text):
        begin = text.rfind("\n", at, m.start()) + 1 or at
        for _ in range(200):
            above = text.rfind("\n", at, max(at, begin - 1)) + 1 or at
            if begin <= at or not _KEY_LINE.fullmatch(text, above, begin - 1):
                break
            begin = above
        parts += [text[at:begin], MASK]
        at = m.end()
    return "".join([*parts, text[at:]])


def _query(m: re.Match[str]) -> str:
    if not _QUERY_SECRET.search(m[2]) or re.fullmatch(r"[\d.,]+", m[4]):
        return m[0]
    return f"{m[1]}{m[2]}{m[3]}{MASK}"


def _named(text: str) -> str:
    """The values behind names that announce a secret, masked."""
    parts: list[str] = []
    at = 0
    pos = 0
    while m := _NAMED.search(text, pos):
        pos = m.end()
        head = _name_before(text, m.start())
        flag = head.startswith("-")
        blank = not set(m["sep"]) & set(":=,")
        header = m["header"] and not (m["header"].lower().startswith("x-") and "=" in m["sep"])
        if blank and (flag if text[pos] == "-" else not flag and (m["header"] or text[pos] in "([{→←")):
            continue  # the next flag; a frame or a table
        if m["token"] and (_TOKENIZER.search(head) or (blank and not flag)):
            continue
        several = (blank and flag and "key" in m[0].lower()) or _PLURAL.search(m[0]) is not None
        end = _header_end(text, m) if header else _end(text, pos, several)
        value = text[pos:end]
        if _HARMLESS.fullmatch(value) or _MASKED.match(value):
            pos = max(pos, end)
            continue
        if m["token"] and _COUNT.fullmatch(value) and not (_OF_A_USER.match(m["token"]) or _VARIABLE.search(head)):
            continue
        parts += [text[at:pos], MASK]
        at = pos = end
    return "".join([*parts, text[at:]]) if parts else text


def _name_before(text: str, start: int) -> str:
    """What of the name stands before the word that announces a secret: at most 60 characters."""
    begin = start
    while begin > 0 and start - begin < 60 and (text[begin - 1].isalnum() or text[begin - 1] in "_-."):
        begin -= 1
    return text[begin:start]


def _line_end(text: str, pos: int) -> int:
    end = text.find("\n", pos)
    return len(text) if end < 0 else end


def _header_end(text: str, m: re.Match[str]) -> int:
    """A header's value: a string where its name is one, else up to the quote that opened before its name, or the line's
    end."""
    end = _line_end(text, m.end())
    if m["close"]:
        return _end(text, m.end(), several=False)
    before = text[m.start() - 1 : m.start()]
    closing = text.find(before, m.end(), end) if before in ("'", '"') and before else -1
    return closing if closing >= 0 else end


def _end(text: str, pos: int, several: bool) -> int:
    """Where the value that begins at `pos` ends: strings, brackets and bare words that touch; more words of a list."""
    line = _line_end(text, pos)
    if scheme := _SCHEME.match(text, pos):
        pos = scheme.end()
    while True:
        begin = pos
        while pos < line and not text[pos].isspace():
            if string := _STRING.match(text, pos):
                if pos > begin and _closes(text, string.end(), line):
                    break  # what the name stands in
                pos = _string_end(text, string.end(), string["q"], line)
            elif text[pos] in _CLOSES and not text.startswith(MASK, pos):
                closing = text.find(_CLOSES[text[pos]], pos, line)
                pos = line if closing < 0 else closing + 1
            elif text.startswith(MASK, pos):
                pos += len(MASK)
            elif pos > begin and text[pos] in ",;)]}" and (pos + 1 >= line or text[pos + 1] in " \t,;)]}\"'"):
                break
            else:
                pos += 1
        if not several or not (gap := _GAP.match(text, pos)) or gap.end() >= line:
            return pos
        if _NEXT.match(text, gap.end()):
            return pos
        pos = gap.end()


def _closes(text: str, inside: int, line: int) -> bool:
    """Whether the quote before `inside`, within a word, ends what the name stands in, and opens nothing (`ab"cd"ef`)."""
    return inside >= line or text[inside] in " \t,;:)]}\\" or text.find(text[inside - 1], inside, line) < 0


def _string_end(text: str, pos: int, quote: str, line: int) -> int:
    """After the closing quote; the end of the line where a string was cut."""
    while (found := text.find(quote, pos, line)) >= 0:
        slashes = 0
        while text[found - 1 - slashes] == "\\" and found - 1 - slashes >= pos:
            slashes += 1
        if slashes % 2 == 0:
            return found + len(quote)
        pos = found + 1
    return line


def redact_addresses(text: str) -> str:
    """IPv4 addresses as `10.x.x.1` → `ip-1`, `ip-2`, …: the same address keeps its name, so the picture stays whole."""
    names: dict[str, str] = {}
    return _ADDRESS.sub(lambda m: names.setdefault(m[0], f"ip-{len(names) + 1}"), text)
