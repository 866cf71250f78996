"""Where a life of an engine begins in its log: the line that prints its arguments."""

from closeranks.diagnose.readers._signatures import Sig, SignatureReader


class Lives(SignatureReader):
    """One event per start; `side` is its role in a pair, where the line tells, else `port` tells engines apart."""

    NAME = "engine-lives"
    ABOUT = "the lines with which SGLang and vLLM begin: what stands before the last of them is of a former life"
    SIGNATURES = (
        Sig("life_began", "non-default args:", r"(?:.*?kv_role\W{1,4}(?P<side>kv_producer|kv_consumer))?"),
        Sig(
            "life_began",
            "server_args=",
            r"server_args=(?:ServerArgs\(|\{'(?:.*?'port': (?P<port>\d+))?)"
            r"(?:.*?disaggregation_mode(?:=|': )'(?P<side>prefill|decode)')?",
        ),
    )


LINE_READERS = (Lives,)
