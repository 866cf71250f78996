"""Small random models as Hugging Face folders, groups of ranks in threads, and a schedule that drives runners."""

import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from closeranks.engine.rank.collectives import Group, Solo
from closeranks.engine.rank.convert import Converted, prepare
from closeranks.engine.rank.kernels import Kernels, choose
from closeranks.engine.rank.models.hf import from_hf
from closeranks.engine.rank.models.llama import Llama
from closeranks.engine.rank.models.names import expected
from closeranks.engine.rank.models.shard import Shard
from closeranks.engine.rank.planes import Pool
from closeranks.engine.rank.runner import Runner, StepResult
from closeranks.engine.rank.tensorfile import TensorWriter
from closeranks.engine.rank.weights import reader
from closeranks.protocol import Begin, Row, Sampling, Step

T = TypeVar("T")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Rope scaling of Llama 3."""
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 100,
    "vocab_size": 131,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights that spread the logits well."""
    shapes = expected(from_hf(config)[0])
    rng = np.random.default_rng(seed)

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm.weight"):
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        scale = 0.2 if name.endswith("bias") else 2.0 / np.sqrt(shape[-1])
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    return {name: one(name, shape) for name, shape in shapes.items()}


def tokenizer(vocab: int) -> str:
    """A tokenizer.json of single words."""
    words = {f"w{i}": i for i in range(vocab)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    return json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}})


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        writer = TensorWriter(file, {name: ("F32", values.shape) for name, values in tensors.items()})
        for name, values in tensors.items():
            writer.write(name, values)


def folder(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A model folder: LLAMA with `changes` to its config."""
    config = LLAMA | changes
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer(config["vocab_size"]))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w1", "eos_token": {"content": "w2"}}))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    write_tensors(path / "model.safetensors", weights(config, seed))
    return path


def silent(text: str) -> None:
    """Takes the place of progress notes."""


def convert(source: Path, cache: Path, dtype: str = "float32") -> Converted:
    return prepare(str(source), str(cache), dtype, silent)


def model(converted: Converted, rank: int = 0, size: int = 1, kernels: Kernels | None = None) -> Llama:
    cpu = torch.device("cpu")
    dtype = getattr(torch, converted.manifest.dtype)
    shard = Shard.of(converted.config, rank, size)
    return Llama(converted.config, shard, reader(converted, cpu), kernels or choose(cpu, dtype, 1))


class ThreadGroup:
    """Ranks as threads of one process. Sums are added in rank order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.cells: list[torch.Tensor] = [torch.empty(0)] * size

    def member(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    """One rank of a `ThreadGroup`; see `collectives.Group`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.ticks = 0
        self.chain = 0

    def _exchange(self, t: torch.Tensor) -> list[torch.Tensor]:
        self.group.cells[self.rank] = t.clone()
        self.group.barrier.wait()
        cells = list(self.group.cells)
        self.group.barrier.wait()
        self.ticks += 1
        return cells

    def tick(self) -> None:
        self.ticks += 1

    def begin(self, step: int) -> None:
        """Nothing to keep."""

    def all_reduce(self, t: torch.Tensor) -> None:
        parts = self._exchange(t)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        t.copy_(total)

    def gather(self, t: torch.Tensor) -> list[torch.Tensor] | None:
        parts = self._exchange(t)
        return parts if self.rank == 0 else None

    def broadcast(self, t: torch.Tensor) -> None:
        t.copy_(self._exchange(t)[0])

    def close(self) -> None:
        """Nothing to leave."""


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """Run `work(group)` on every rank, in threads; results by rank. The first exception is raised."""
    if size == 1:
        return [work(Solo())]
    group = ThreadGroup(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(group.member(rank))
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return [results[r] for r in range(size)]


def runner(model: Llama, group: Group, pages: int = 128, page_size: int = 4, slots: int = 8) -> Runner:
    pool = Pool(model.pages, pages, page_size, group.rank, group.size)
    pool.tensor.normal_()  # what was in a page before must not matter
    return Runner(model, pool, group, slots)


def serve(
    run: Callable[[Step], StepResult],
    prompts: Sequence[list[int]],
    new: int,
    chunk: int,
    page_size: int,
    pages: int,
    seed: int = 0,
    sampling: Sequence[Sampling] = (),
) -> list[list[int]]:
    """Drive rows through a mixed schedule: chunks of several prompts and decode rows share steps, pages are scattered.

    The schedule follows from `seed` alone, so that all ranks can be driven by the same call.
    """
    rng = random.Random(seed)
    free = list(range(pages))
    rng.shuffle(free)
    sampling = sampling or [Sampling()] * len(prompts)
    tokens = [list(p) for p in prompts]
    done = [0] * len(prompts)
    owned = [0] * len(prompts)
    n = 0
    while any(len(t) < len(p) + new for t, p in zip(tokens, prompts)):
        rows: list[Row] = []
        for slot, prompt in enumerate(prompts):
            left = len(tokens[slot]) - done[slot]
            if len(tokens[slot]) >= len(prompt) + new or rng.random() < 0.25:
                continue
            count = min(left, rng.randint(1, chunk))
            need = -(-(done[slot] + count) // page_size) - owned[slot]
            fresh = [free.pop() for _ in range(need)]
            begin = Begin(sampling[slot], prompt, len(prompt), fresh) if done[slot] == 0 else None
            rows.append(Row(slot, done[slot], count, [] if begin else fresh, count == left, begin))
            owned[slot] += need
            done[slot] += count
        rng.shuffle(rows)
        n += 1
        sampled = iter(run(Step(1, n, rows)).tokens)
        for row in rows:
            if row.sample:
                tokens[row.slot].append(next(sampled))
    return [t[len(p) :] for t, p in zip(tokens, prompts)]
