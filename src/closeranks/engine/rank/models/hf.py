"""A Hugging Face `config.json` as a `ModelConfig`.

A field that is absent has the default of the family's config class in transformers, `null` is what `null` is there. A
value of the wrong kind is an error that names file and field: what is guessed here would be wrong tokens later.
"""

import math
from typing import Any

from .config import ModelConfig, UnsupportedModel

_SHARED = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _SHARED | {"intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": _SHARED
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _SHARED
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}
"""By `model_type`, as of transformers 5.24; a test compares. What is not here is `null` or false there."""

MOST = 2**31 - 1
"""Of any size: positions are int32."""

FLOAT32 = (1e-37, 1e38)
"""What float32 holds without loss."""


class Fields:
    """The fields of a JSON object, checked as they are read. `where` names the object in errors."""

    def __init__(self, values: dict[str, Any], where: str, defaults: dict[str, Any] | None = None) -> None:
        self.values, self.where, self.defaults = values, where, defaults or {}

    def wrong(self, name: str, wanted: str) -> UnsupportedModel:
        """The error about a field's value."""
        if name not in self.values:
            return UnsupportedModel(f"{self.where}: {name} is missing: {wanted} is expected")
        return UnsupportedModel(f"{self.where}: {name} is {shown(self.values[name])}: {wanted} is expected")

    def get(self, name: str) -> Any:
        return self.values.get(name, self.defaults.get(name))

    def whole(self, name: str, most: int = MOST) -> int:
        """A size: a whole number of at least 1."""
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(name, f"a whole number from 1 to {most}")
        return value

    def number(self, name: str, least: float = 0.0, most: float = 1e300) -> float:
        """A finite number above 0, and between the bounds."""
        value = self.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least < value < most:
            return float(value)
        raise self.wrong(name, "a number above 0" if not least else f"a number between {least:g} and {most:g}")

    def flag(self, name: str) -> bool:
        """true or false; null is false."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.wrong(name, "true or false")

    def text(self, name: str) -> str:
        """Text; null and absent are empty."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        raise self.wrong(name, "text")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or null: whole numbers of any size."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(ids)

    def inner(self, name: str) -> dict[str, Any]:
        """An object; null and absent are empty."""
        value = self.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        raise self.wrong(name, "an object")


def shown(value: Any, most: int = 60) -> str:
    """A value of a JSON file as an error shows it: short, however long it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    text = repr(value[: most + 1] if isinstance(value, str) else value)
    return text if len(text) <= most + 2 else text[:most] + "…"


def from_hf(config: dict[str, Any], where: str = "config.json") -> tuple[ModelConfig, list[float]]:
    """A `config.json` -> (config, rope inverse frequencies); raises `UnsupportedModel`. `where`: the file's name."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise UnsupportedModel(f"{where}: model_type {shown(kind)}")
    fields = Fields(config, where, DEFAULTS[kind])
    if fields.get("hidden_act") not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {shown(fields.get('hidden_act'))}")
    if config.get("quantization_config"):
        raise UnsupportedModel(f"{where}: quantised weights (quantization_config)")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = heads if fields.get("num_key_value_heads") is None else fields.whole("num_key_value_heads")
    if heads % kv_heads:
        said = f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        raise UnsupportedModel(f"{where}: {said}")
    own = config.get("head_dim") is not None
    head_dim = fields.whole("head_dim") if own else hidden // heads
    if not 2 <= head_dim <= 65536 or head_dim % 2:
        name = "head_dim" if own else f"hidden_size {hidden} / num_attention_heads {heads}"
        raise UnsupportedModel(f"{where}: {name} gives heads of {head_dim}: an even number up to 65536 is expected")
    context = fields.whole("max_position_embeddings")
    slides = kind == "mistral" or (kind == "qwen2" and fields.flag("use_sliding_window"))
    if slides and fields.get("sliding_window") is not None:  # exact up to the window, so that is the context served
        context = min(context, fields.whole("sliding_window"))
    if context < 2:
        raise UnsupportedModel(
            f"{where}: a context of 1 token (max_position_embeddings, sliding_window) holds a prompt, but no answer"
        )
    bos = fields.get("bos_token_id")
    if bos is not None and (not isinstance(bos, int) or isinstance(bos, bool)):
        raise fields.wrong("bos_token_id", "a token id")
    bias = kind == "llama" and fields.flag("attention_bias")  # the others' classes have no such field
    result = ModelConfig(
        architecture=kind,
        layers=fields.whole("num_hidden_layers", 10000),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.whole("intermediate_size"),
        vocab=fields.whole("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", *FLOAT32),
        context_length=context,
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=kind == "llama" and fields.flag("mlp_bias"),
        bos_token_id=-1 if bos is None else bos,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    return result, inverse_frequencies(head_dim, rope_fields(fields))


def rope_fields(fields: Fields) -> Fields:
    """Rope parameters from wherever a config keeps them, in transformers' order of precedence."""
    name = "rope_scaling" if fields.inner("rope_scaling") else "rope_parameters"
    rope = dict(fields.inner(name))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = fields.number("rope_theta")
    if "partial_rotary_factor" not in rope:
        rope["partial_rotary_factor"] = fields.values.get("partial_rotary_factor", 1.0)
    original = "original_max_position_embeddings"
    if original in fields.values:
        rope[original] = fields.values[original]
    else:
        rope.setdefault(original, fields.get("max_position_embeddings"))
    return Fields(rope, f"{fields.where}: {name}")


def inverse_frequencies(head_dim: int, rope: Fields) -> list[float]:
    """The `head_dim / 2` rope frequencies under `rope` scaling (`default`, `linear` or `llama3`).

    In torch's float32 operations and their usual order: a difference in the last bit would grow with the position.
    """
    import torch

    kind, theta = rope.get("rope_type"), rope.number("rope_theta")
    if not isinstance(kind, str) or kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"{rope.where}: rope_type {shown(kind)}")
    if rope.get("partial_rotary_factor") is not None and rope.number("partial_rotary_factor") != 1.0:
        raise rope.wrong("partial_rotary_factor", "1")
    layered = [name for name, value in rope.values.items() if isinstance(value, dict)]
    if layered:
        raise UnsupportedModel(f"{rope.where}: {shown(layered[0])} is an object: rope of its own for some layers")
    f = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim))
    if kind == "linear":
        f = f / rope.number("factor")
    elif kind == "llama3":
        factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
        original = rope.number("original_max_position_embeddings")
        if low >= high:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor {low}")
        wavelength = 2 * math.pi / f
        smooth = (original / wavelength - low) / (high - low)
        between = (1 - smooth) * f / factor + smooth * f
        f = torch.where(wavelength > original / low, f / factor, torch.where(wavelength < original / high, f, between))
    if not bool(torch.isfinite(f).all()) or not bool((f > 0).all()):
        raise UnsupportedModel(f"{rope.where}: float32 does not hold what {', '.join(rope.values)} give together")
    return [float(x) for x in f]
