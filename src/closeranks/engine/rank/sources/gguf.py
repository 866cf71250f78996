"""Weights from a GGUF file: metadata, any quantisation that the `gguf` package can widen, tokenizer, chat template."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..models.config import ModelConfig, UnsupportedModel
from ..models.hf import FLOAT32, Fields, inverse_frequencies
from ..models.names import HEAD, expected, gguf_name
from . import Source, known_ids
from .folder import save_tokenizer

OWN = (
    *("embedding_length", "block_count", "feed_forward_length", "context_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.sliding_window"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor"),
)
"""Metadata under the architecture's name."""
SPECIAL = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


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
    config, rope = read_config(architecture, meta, set(tensors), str(path))
    config, warnings = known_ids(config, str(path))
    inv_freq = inverse_frequencies(config.head_dim, rope)
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


def read_config(architecture: str, meta: Any, tensors: set[str], where: str) -> tuple[ModelConfig, Fields]:
    """(config, rope parameters) from GGUF metadata; `where` names the file in errors."""
    if meta(f"{architecture}.expert_count", 0):
        raise UnsupportedModel(f"{where}: a mixture of experts ({architecture}.expert_count)")
    tokens = meta("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedModel(f"{where}: the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    found = {name: meta(f"{architecture}.{name}") for name in OWN} | {name: meta(name) for name in SPECIAL}
    fields = Fields({k: v for k, v in found.items() if v is not None}, f"{where}: {architecture}")
    if isinstance(found["attention.head_count"], list) or isinstance(found["attention.head_count_kv"], list):
        raise UnsupportedModel(f"{where}: attention.head_count or head_count_kv differs between layers")
    hidden = fields.whole("embedding_length")
    heads = fields.whole("attention.head_count")
    if found["attention.key_length"] is None and not 1 <= hidden // heads <= 65536:
        said = f"embedding_length {hidden} / attention.head_count {heads} gives a head dimension of {hidden // heads}"
        raise UnsupportedModel(f"{where}: {said}: 1 to 65536 is expected")
    fields.defaults = {
        "attention.head_count_kv": heads,
        "attention.key_length": hidden // heads,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "none",
    }
    head_dim = fields.whole("attention.key_length", 65536)
    if found["rope.dimension_count"] not in (None, head_dim):
        raise fields.wrong("rope.dimension_count", f"{head_dim}, the whole head,")
    scaling = fields.get("rope.scaling.type")
    if scaling not in ("none", "linear"):
        raise fields.wrong("rope.scaling.type", "none or linear")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", *FLOAT32)}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor", *FLOAT32)}
    context = fields.whole("context_length")
    if found["attention.sliding_window"] not in (None, 0):  # llama.cpp writes 0 for none
        context = min(context, fields.whole("attention.sliding_window"))
    bos, eos, turn = (fields.token_ids(name)[:1] for name in SPECIAL)
    return ModelConfig(
        architecture=architecture,
        layers=fields.whole("block_count", 10000),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv"),
        head_dim=head_dim,
        intermediate=fields.whole("feed_forward_length"),
        vocab=len(tokens),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", *FLOAT32),
        context_length=context,
        tied=gguf_name(HEAD) not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        bos_token="".join(str(tokens[i]) for i in bos if 0 <= i < len(tokens)),
        eos_token="".join(str(tokens[i]) for i in eos if 0 <= i < len(tokens)),
        bos_token_id=bos[0] if bos else -1,
        eos_token_ids=tuple(dict.fromkeys((*eos, *turn))),
    ), Fields(rope, f"{where}: {architecture}: rope.scaling")
