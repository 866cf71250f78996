"""What a model is, apart from its weights: shapes and constants.

A Hugging Face config (`models.hf`) and GGUF metadata (`sources.gguf`) are reduced to one `ModelConfig` at conversion;
the model code sees nothing else. Rope frequencies are a tensor of the converted weights (`rope.inv_freq`), so that no
kind of rope scaling reaches the model code either.
"""

import math

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
        if self.context_length < 2:
            raise UnsupportedModel("the model's context of 1 token holds a prompt, but no answer")
        if not 0 < self.norm_eps < math.inf:
            raise UnsupportedModel(f"the model's norm_eps is {self.norm_eps} as float32")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} query heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            said = f"the head dimension {self.head_dim} is odd (hidden size {self.hidden}, {self.heads} heads)"
            raise UnsupportedModel(said)
