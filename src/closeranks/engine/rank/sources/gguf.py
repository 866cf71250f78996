"""Weights from a GGUF file: metadata, any quantisation that the `gguf` package can widen, tokenizer, chat template."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..models.config import ModelConfig, UnsupportedModel
from ..models.hf import Fields, inverse_frequencies
from ..models.names import HEAD, expected, gguf_name
from . import Source, known_ids
from .folder import save_tokenizer


def open_gguf(path: Path) -> Source:
    """Raises `UnsupportedModel` for what cannot be run, `ValueError` or `OSError` for damaged files."""
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path}: not a sound GGUF file: {error}") from error
    tensors = {t.name: t for t in reader.tensors}

    def meta(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    architecture = meta("general.architecture")
    if architecture not in ("llama", "qwen2"):
        raise UnsupportedModel(f"GGUF architecture {architecture!r}")
    config, rope = read_config(architecture, meta, set(tensors))
    config, warnings = known_ids(config, str(path))
    inv_freq = inverse_frequencies(config.head_dim, Fields(rope, f"{path}: rope"))
    if "rope_freqs.weight" in tensors:  # llama3 scaling, as factors
        factors = np.asarray(tensors["rope_freqs.weight"].data, np.float32)
        inv_freq = [float(np.float32(f) / x) for f, x in zip(inv_freq, factors, strict=True)]

    def read(name: str) -> npt.NDArray[np.float32]:
        tensor = tensors[gguf_name(name)]
        values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        if architecture == "llama":
            for part, heads in ((".q_proj.", config.heads), (".k_proj.", config.kv_heads)):
                if part in name:
                    values = unpermuted(values, heads)
        return values

    known = {gguf_name(n) for n in (*expected(config), HEAD)} | {"rope_freqs.weight"}
    return Source(
        config=config,
        inv_freq=inv_freq,
        read=read,
        unknown=sorted(set(tensors) - known),
        write_tokenizer=lambda target: save_tokenizer(target, str(path.parent), gguf_file=path.name),
        chat_template=str(meta("tokenizer.chat_template", "")),
        warnings=warnings,
    )


def unpermuted(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of the rotary halves in q and k (weights and biases): pairs back to halves."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def read_config(architecture: str, meta: Any, tensors: set[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, rope parameters) from GGUF metadata."""

    def need(key: str) -> Any:
        value = meta(f"{architecture}.{key}")
        if value is None:
            raise UnsupportedModel(f"the GGUF file lacks {architecture}.{key}")
        return value

    if meta(f"{architecture}.expert_count", 0):
        raise UnsupportedModel("a mixture of experts")
    tokens = meta("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModel("the GGUF file has no tokenizer")
    hidden, heads = int(need("embedding_length")), need("attention.head_count")
    kv_heads = meta(f"{architecture}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise UnsupportedModel("head counts that differ between layers")
    head_dim = int(meta(f"{architecture}.attention.key_length", hidden // heads))
    if meta(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("rope over a part of the head")
    rope = {"rope_type": "default", "rope_theta": meta(f"{architecture}.rope.freq_base", 10000.0)}
    scaling = meta(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModel(f"rope scaling {scaling!r}")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": need("rope.scaling.factor")}
    context = int(need("context_length"))
    window = meta(f"{architecture}.attention.sliding_window")
    bos, eos = meta("tokenizer.ggml.bos_token_id"), meta("tokenizer.ggml.eos_token_id")
    ends = dict.fromkeys(int(i) for i in (eos, meta("tokenizer.ggml.eot_token_id")) if i is not None)
    return ModelConfig(
        architecture=architecture,
        layers=int(need("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=int(need("feed_forward_length")),
        vocab=len(tokens),
        norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        context_length=min(context, int(window)) if window else context,
        tied=gguf_name(HEAD) not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        bos_token=str(tokens[bos]) if bos is not None and 0 <= bos < len(tokens) else "",
        eos_token=str(tokens[eos]) if eos is not None and 0 <= eos < len(tokens) else "",
        bos_token_id=-1 if bos is None else int(bos),
        eos_token_ids=tuple(ends),
    ), rope
