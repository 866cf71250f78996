"""What a model is, apart from its weights: shapes and constants, read from a Hugging Face config or GGUF metadata.

Both sources are reduced to one `ModelConfig` at conversion; the model code sees nothing else. Rope frequencies are a
tensor of the converted weights (`rope.inv_freq`), so that no kind of rope scaling reaches the model code either.
"""

import math
from typing import Any

import msgspec
import numpy as np

SUPPORTED = (
    "Llama (also SmolLM, SmolLM2, Llama 2/3.x, TinyLlama), Mistral (contexts within its sliding window) and Qwen2, "
    "as a folder with config.json and *.safetensors or as a GGUF file (architectures llama, qwen2)"
)


class UnsupportedModel(ValueError):
    """The model (or its files) cannot be run here; the message says what is wrong and what is supported."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Supported: {SUPPORTED}.")


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Llama-like decoder."""

    architecture: str
    """`llama`, `mistral` or `qwen2`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    context_length: int
    """Longest sequence, in tokens."""
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bos_token: str = ""
    eos_token: str = ""
    bos_token_id: int = -1
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # GGUF holds 1e-5 as float32: the shortest decimal of the float32 makes both sources' configs equal.
        msgspec.structs.force_setattr(self, "norm_eps", float(str(np.float32(self.norm_eps))))
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context_length"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"the model's {name} is {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} query heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"the head dimension {self.head_dim} is odd")


def from_hf(config: dict[str, Any]) -> tuple[ModelConfig, list[float]]:
    """A Hugging Face `config.json` -> (config, rope inverse frequencies); raises `UnsupportedModel`."""
    kind = config.get("model_type")
    if kind not in ("llama", "mistral", "qwen2"):
        raise UnsupportedModel(f"model_type {kind!r} in config.json")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r}")
    if config.get("quantization_config"):
        raise UnsupportedModel("quantised weights (quantization_config in config.json)")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        context = int(config["max_position_embeddings"])
        window = config.get("sliding_window")
        if kind == "qwen2" and not config.get("use_sliding_window"):
            window = None
        if window:  # exact up to the window, so that is the context served
            context = min(context, int(window))
        eos = config.get("eos_token_id")
        bias = bool(config.get("attention_bias", False))
        result = ModelConfig(
            architecture=kind,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            context_length=context,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind == "llama",
            mlp_bias=bool(config.get("mlp_bias", False)),
            bos_token_id=-1 if config.get("bos_token_id") is None else int(config["bos_token_id"]),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )
    except UnsupportedModel:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModel(f"config.json: missing or malformed {error}") from error
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    return result, inverse_frequencies(head_dim, theta, rope)


def inverse_frequencies(head_dim: int, theta: float, rope: dict[str, Any]) -> list[float]:
    """The `head_dim / 2` rope frequencies under `rope` scaling (`default`, `linear` or `llama3`).

    In torch's float32 operations and their usual order: a difference in the last bit would grow with the position.
    """
    import torch

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"rope scaling {rope}")
    f = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim))
    if kind != "default":
        try:
            factor = float(rope["factor"])
            if kind == "llama3":
                low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
                original = float(rope["original_max_position_embeddings"])
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"rope scaling {rope}: missing or malformed {error}") from error
        if kind == "linear":
            f = f / factor
        else:
            wavelength = 2 * math.pi / f
            smooth = (original / wavelength - low) / (high - low)
            between = (1 - smooth) * f / factor + smooth * f
            f = torch.where(
                wavelength > original / low, f / factor, torch.where(wavelength < original / high, f, between)
            )
    return [float(x) for x in f]
