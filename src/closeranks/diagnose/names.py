"""Who a process or a log line is: titles, log prefixes and command lines → `Who`. Nothing else of them is kept."""

import re

from closeranks.diagnose.facts import Who

_PART = re.compile(r"(?<![A-Za-z])(ATTN_CP|MOE_DP|DP|PP|TP|EP)(\d+)(?![A-Za-z])")
_SGLANG = re.compile(r"sglang(?:[_-]?\w+)?::(\w[\w/]*)")
_OURS = re.compile(r"closeranks::(rank|leader|gateway)\b")
_VLLM = re.compile(r"VLLM::(EngineCor\w*|Worker\w*|APIServer\w*|ApiServer\w*|DPCoordinator\w*)")
_VLLM_PROC = re.compile(
    r"(?i:\b(EngineCore|Worker|APIServer|ApiServer|VllmWorker|VllmWorkerProcess|RayWorkerWrapper|RayWorkerProc|DPCoordinator)"
    r"((?:_[A-Z]+\d+)*|_\d+|)(?:\s+rank=(\d+))?\s*(?:pid=(\d+))?)"
)


def parts(text: str) -> dict[str, int]:
    """`DP0_TP3_EP3` or ` DP0 TP3` → {"dp": 0, "tp": 3, "ep": 3}."""
    found = {m[1].lower(): int(m[2]) for m in _PART.finditer(text.replace("_", " "))}
    return {k: v for k, v in found.items() if k in ("dp", "pp", "tp", "ep")}


def from_title(title: str) -> Who | None:
    """The process behind a title or command line of ps or py-spy; None when nothing in it is known."""
    title = title[:400]
    if re.search(r"\b(?:vllm|sglang|mini)[_-](?:router|lb)\b|sglang\.launch_router|\bsmg\b", title):
        return Who(kind="router", family="sglang" if "sglang" in title or "smg" in title else "")
    if m := _OURS.search(title):
        kind = {"rank": "worker", "leader": "launcher", "gateway": "router"}[m[1]]
        return Who(kind=kind, family="closeranks", **parts(title))
    if m := _SGLANG.search(title):
        word = m[1]
        if word.startswith("schedul"):
            return Who(kind="scheduler", family="sglang", **parts(word.removeprefix("scheduler")))
        for prefix, kind in (
            ("detok", "detokenizer"),
            ("data_parallel", "dp_controller"),
            ("http_server", "api"),
            ("tokenizer", "api"),
        ):
            if word.startswith(prefix):
                return Who(kind=kind, family="sglang")
        return Who(kind="other", family="sglang")
    if m := _VLLM.search(title):
        word = m[1]
        where = parts(word)
        if word.startswith("EngineCor"):
            return Who(kind="engine_core", family="vllm", **where)
        if word.startswith("Worker"):
            return Who(kind="worker", family="vllm", **where)
        return Who(kind="api", family="vllm")
    if "RayWorker" in title:
        m2 = re.search(r"rank=\[?(\d+)", title)
        return Who(kind="worker", family="vllm", rank=int(m2[1]) if m2 else None)
    if re.search(r"sglang\.launch_server|sglang serve", title):
        return Who(kind="launcher", family="sglang")
    if re.search(r"\bvllm serve\b|vllm\.entrypoints", title):
        return Who(kind="api", family="vllm")
    if re.search(r"trtllm-serve|tensorrt_llm|trtllm", title):
        return Who(kind="api" if "serve" in title else "worker", family="tensorrt-llm")
    if re.search(r"\bdynamo\b", title):
        return Who(kind="other", family="dynamo")
    if m3 := re.search(r"(?:--(?:local[-_])?rank[= ]|\bRANK=)(\d{1,5})\b", title):
        return Who(kind="torch", family="torch", rank=int(m3[1]))
    return None


def from_file(name: str) -> Who | None:
    """A rank from a file's name (`nccl_trace_rank_3`, `pyspy_r73.txt`, `rank0.log`): the weakest of the sources."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    m = re.search(r"(?i)(?:rank[_-]?|(?<![a-z])r|(?<![a-z])tp[_-]?)(\d{1,5})(?!\d)", base)
    return Who(kind="torch", family="torch", rank=int(m[1])) if m else None


def role_in_path(name: str) -> str:
    """`decode` or `prefill` where a folder or file of the evidence is called so, "" for none or both."""
    found = {m[1].lower() for m in re.finditer(r"(?i)(?<![a-z])(prefill|decode)(?![a-z])", name)}
    return found.pop() if len(found) == 1 else ""


def from_vllm_proc(text: str) -> Who | None:
    """`(EngineCore_DP0 pid=1)`, `(VllmWorker rank=0 pid=9)` → Who; the innermost of nested ones."""
    best: Who | None = None
    for m in _VLLM_PROC.finditer(text, 0, 160):
        kind_word = m[1].lower()
        where = parts(m[2] or "")
        if kind_word.startswith("enginecore"):
            best = Who(kind="engine_core", family="vllm", **where)
        elif kind_word.startswith("api") or kind_word.startswith("dpcoord"):
            best = Who(kind="api", family="vllm")
        else:
            best = Who(kind="worker", family="vllm", rank=int(m[3]) if m[3] else None, **where)
    return best
