"""Requests that a log prints: prompts, messages, answers. What looks like a signature in there was said by a user."""

import re

# Plain texts of which one is in every line that begins such a print, for the search over whole blocks.
TOKENS = (
    "ReqInput(",
    ": obj=",
    "Generated response ",
    "prompt: '",
    'prompt: "',
    "Req(rid=",
    "origin_input_text",
    "input_ids=",
    '"messages"',
)
BEGINS = re.compile(
    rb"(?:Generate|Embedding)ReqInput\(|(?:Receive|Finish): obj=|Generated response \S{1,80}: |\bprompt: ['\"]"
    rb"|\bReq\(rid=|origin_input_text|\binput_ids=|\"messages\""
)
_VLLM = re.compile(rb"Generated response |\bprompt: ['\"]")
_VLLM_AFTER = re.compile(rb"params: |SamplingParams\(|output_token_ids|finish_reason")
_PROCESS = re.compile(rb"^.{0,100}?(\([A-Z]\w{2,40}(?: rank=\d+)? pid=\d+[^)]{0,60}\)) ")

# Where a record of a log begins, behind the prefixes with which collectors and vLLM begin every line of one.
RECORD = re.compile(
    rb"""(?xm)^(?:
    \x1b\[[0-9;]*m | [\w.-]{1,64}\s{0,20}\|\x20 | \[pod/[^\]\s]{1,200}\]\x20 | <\d{1,3}> | \{"log":"
    | \d{4}-\d\d-\d\dT[\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)\x20(?:std(?:out|err)\x20[FP]\x20)?
    | [A-Z][a-z]{2}\x20{1,2}\d{1,2}\x20[\d:]{8}\x20\S{1,64}\x20\S{1,64}:\x20
    | \([A-Z]\w{2,40}(?:\x20rank=\d+)?\x20pid=\d+[^)\n]{0,60}\)\x20
    ){0,6}(?:
    \[(?:\d{4}-\d\d-\d\d\x20)?\d\d:\d\d:\d\d
    | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\x20\d\d-\d\d\x20\d\d: | INFO:\x20+\d
    | \[rank\d+\]: | \[\d\d/\d\d/\d{4}-\d\d: | \d{4}-\d\d-\d\d[\x20T]\d\d:\d\d:\d\d | [IWEF]\d{4}\x20\d\d:
    | Process\x20\d+:\x20
    | \{"(?:ts|time|level|log|message|msg|timestamp|@timestamp|severity)"
    | \[(?:full|swa)\]\x20total= | (?:self|scheduler)\.\w
    )"""
)


class Quotes:
    """One file's pass over prints of requests: which lines belong to one that an earlier line began."""

    def __init__(self) -> None:
        self.since = -1  # place in the block from which no record was seen to begin; -1 outside of a print
        self.process = b""

    def block(self, read: bool) -> None:
        """A new block of the file; what went unread may have held the end."""
        self.since = 0 if self.since >= 0 and read else -1

    def holds(self, block: bytes, at: int, end: int, begins: bool) -> bool:
        """Whether the line at `at` is, or belongs to, a print of a request. `begins`: one may begin in it."""
        if self.since >= 0:
            if RECORD.search(block, self.since, end) is None and self._same_process(block, at, end):
                self.since = end + 1
                return True
            self.since = -1
        if not begins:
            return False
        line = block[at:end]
        if not line[:1].isspace() and not _closed(line):  # what is indented is of a dump: an argument, a local
            self.since = end + 1
            m = _PROCESS.match(line)
            self.process = m[1] if m else b""
        return True

    def _same_process(self, block: bytes, at: int, end: int) -> bool:
        m = _PROCESS.match(block[at : min(end, at + 300)])
        return m is None or not self.process or m[1] == self.process


def _closed(line: bytes) -> bool:
    """Whether a print ends in the line that it began in, as all do that escape line breaks."""
    if _VLLM.search(line) and not _VLLM_AFTER.search(line):
        return False
    return all(line.count(a) <= line.count(b) for a, b in ((b"(", b")"), (b"[", b"]"), (b"{", b"}")))
