"""How near the embedded model comes to what its linear layers alone allow, and to transformers, on this machine's CPU.

    python bench/model_limits.py [--threads 2] [--repeats 15] [--context 200] [--json]

`serve_throughput.py --limit` takes the linear layers along as a peer.

`linear` runs only the packed linear layers (all of them, the output layer included) on as many rows: nothing that
computes the model with these layers can be faster. `forward` is the whole pass over paged KV; `transformers` is the
same weights in transformers (float32, sdpa, its dynamic cache). The three take turns in every repetition, so that other
work on the machine meets all alike; the figures are medians.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # as the ranks of a served engine have it; before torch loads

import numpy as np
import torch

from closeranks.cli.serve import huge_pages
from closeranks.engine.rank.collectives import Solo
from closeranks.engine.rank.models.batch import Batch, make_batch
from closeranks.engine.rank.models.llama import Llama
from closeranks.engine.rank.models.names import EMBED, ROPE
from closeranks.engine.rank.planes import Pool
from closeranks.engine.rank.settings import Settings
from closeranks.engine.rank.tensorfile import TensorFile
from closeranks.engine.rank.weights import Loaded, load

PAGE = 16


def batch_of(model: Llama, rows: int, count: int, start: int) -> Batch:
    """Rows of `count` random tokens behind `start` positions, on pages of their own."""
    width = -(-(start + count) // PAGE)
    table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    tokens = torch.randint(0, model.config.vocab, (rows * count,), dtype=torch.int32)
    full = np.full(rows, 1, np.int32)
    return make_batch(full * start, full * count, table, PAGE, tokens, list(range(rows)))


def linear_only(model: Llama, tokens: int, sampled: int) -> Callable[[], None]:
    """All linear layers on random activations."""
    c = model.config
    widths = (c.hidden, c.heads * c.head_dim, c.hidden, c.intermediate)
    inputs = {width: torch.randn(tokens, width) for width in {*widths, c.hidden}}
    last = torch.randn(sampled, c.hidden)

    def run() -> None:
        for layer in model.layers:
            for linear, width in zip((layer.qkv, layer.out, layer.gate_up, layer.down), widths, strict=True):
                linear(inputs[width])
        model.head(last)

    return run


def reference_of(loaded: Loaded) -> Any:
    """The same weights in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = loaded.converted.config
    file = TensorFile(loaded.converted.path / "model.safetensors")
    theta = float(file.read(ROPE)[1]) ** (-c.head_dim / 2)
    config = LlamaConfig(
        hidden_size=c.hidden, num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, intermediate_size=c.intermediate, vocab_size=c.vocab, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context_length, tie_word_embeddings=c.tied, rope_parameters={
            "rope_type": "default", "rope_theta": theta,
        },
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    state = {name: torch.from_numpy(file.read(name)) for name in file if name != ROPE}
    if c.tied:
        state["lm_head.weight"] = state[EMBED]
    model.load_state_dict(state)
    return model


def reference_run(reference: Any, rows: int, count: int, start: int) -> Callable[[], None]:
    """One pass of transformers behind a filled cache, which is cut back afterwards."""
    from transformers import DynamicCache

    cache = DynamicCache(config=reference.config)
    if start:
        reference(torch.zeros(rows, start, dtype=torch.int64), cache=cache, logits_to_keep=1)
    tokens = torch.ones(rows, count, dtype=torch.int64)

    def run() -> None:
        reference(tokens, cache=cache, logits_to_keep=1)
        cache.crop(-count)

    return run


def measure(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repeats + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if repetition > 1:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def answer_jobs(model: Llama) -> int:
    """`{"prompts": [[token]], "count": n}` a line; the seconds that the linear layers of that generation take."""
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        rows, length = len(job["prompts"]), len(job["prompts"][0])
        prefill, decode = linear_only(model, rows * length, rows), linear_only(model, rows, rows)
        began = time.perf_counter()
        prefill()
        for _ in range(job["count"] - 1):
            decode()
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    return 0


@torch.inference_mode()
def main() -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--context", type=int, default=200, help="tokens before a decode row's")
    parser.add_argument("--model-path", default="")
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", action="store_true", help="answer serve_throughput.py on stdin: linear layers only")
    args = parser.parse_args()
    loaded = load(
        Settings(
            run_dir="", engine="bench", model_path=args.model_path, cache_dir=args.cache_dir, threads=args.threads,
            dtype="float32",
        )
    )  # fmt: skip
    model, group = loaded.model, Solo()
    if args.jobs:
        return answer_jobs(model)
    cases = [("decode", n, 1, args.context) for n in (1, 8, 32)]
    cases += [("prefill", 1, 128, 0), ("prefill", 1, 512, 0), ("prefill", 1, 512, 1536)]
    pool = Pool(model.pages, max(n * -(-(s + c) // PAGE) for _, n, c, s in cases), PAGE)
    reference = None if args.no_transformers else reference_of(loaded)
    results = []
    for kind, rows, count, start in cases:
        runs: dict[str, Callable[[], Any]] = {
            "linear": linear_only(model, rows * count, rows),
            "forward": lambda r=rows, c=count, s=start: model.forward(batch_of(model, r, c, s), pool.tensor, group),
        }
        if reference is not None:
            runs["transformers"] = reference_run(reference, rows, count, start)
        seconds = measure(runs, args.repeats if kind == "decode" else max(3, args.repeats // 3))
        rate = {name: rows * count / s for name, s in seconds.items()}
        results.append({"kind": kind, "rows": rows, "tokens": count, "behind": start, "tokens_per_s": rate})
        if not args.json:
            shown = "  ".join(f"{name} {value:7.1f}" for name, value in rate.items())
            share = rate["forward"] / rate["linear"]
            print(f"{kind:7} {rows:2} x {count:3} behind {start:4}: tok/s {shown}  = {share:.0%} of linear", flush=True)
    if args.json:
        json.dump(
            {"schema": "closeranks.bench.model-limits/1", "threads": args.threads, "results": results}, sys.stdout
        )
    return 0


if __name__ == "__main__":
    tunables = huge_pages()  # as the ranks of a served engine have them; read when a process starts
    if tunables:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **tunables})
    raise SystemExit(main())
