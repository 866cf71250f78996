"""Loads a converted model: maps the file, cuts the shard, packs it for the device."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .convert import Converted, prepare
from .kernels import choose
from .models.llama import Llama
from .models.names import ROPE
from .models.shard import Shard
from .settings import Settings
from .tensorfile import TensorFile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what the engine's fingerprint needs of it."""

    model: Llama
    converted: Converted
    weights: str
    """Hash of the weights' content (and of the config that interprets them)."""
    tokenizer: str
    """Hash of tokenizer.json."""
    dtype: str
    context_length: int


def load(settings: Settings) -> Loaded:
    """Convert if need be, then load this rank's shard.

    Raises:
        UnsupportedModel, ValueError, OSError: see `convert.prepare`; `ValueError` also for more ranks than KV heads or
            GPUs.
    """
    device = place(settings.device, settings.first_gpu, settings.rank, settings.tp_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where events, streams and collectives of this process are made
    dtype = settings.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    converted = prepare(settings.model_path, settings.cache_dir, dtype)
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.tp_size)
    torch.set_num_threads(threads)
    shard = Shard.of(converted.config, settings.rank, settings.tp_size)
    model = Llama(converted.config, shard, reader(converted, device), choose(device, DTYPES[dtype], threads))
    return Loaded(
        model=model,
        converted=converted,
        weights=converted.manifest.weights,
        tokenizer=converted.manifest.tokenizer,
        dtype=dtype,
        context_length=converted.config.context_length,
    )


def place(device: str, first: int, rank: int, tp_size: int) -> torch.device:
    """The device of one rank. Ranks of a group need a GPU each; two engines share them where there are too few.

    Raises ValueError when torch sees no GPU, or fewer than the ranks need.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count()
    if not count:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ValueError(f"device {device}: torch {torch.__version__} ({built}) sees no GPU: give --device cpu")
    base = int(number) if number else first if first + tp_size <= count else 0
    if base + tp_size > count:
        raise ValueError(
            f"device {device}: {tp_size} ranks from GPU {base} on need {base + tp_size} GPUs, there are {count}"
        )
    return torch.device("cuda", base + rank)


def reader(converted: Converted, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Canonical name -> tensor on the device; on the CPU a view of the mapped file (copy on write)."""
    file = TensorFile(converted.path / "model.safetensors")
    dtype = DTYPES[converted.manifest.dtype]

    def read(name: str) -> torch.Tensor:
        tensor = torch.from_numpy(file.read(name))
        return (tensor if name == ROPE else tensor.view(dtype)).to(device)

    return read
