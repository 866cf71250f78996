"""The tensors of a Llama-like model: canonical (Hugging Face) names with shapes, and GGUF's names for them."""

from .config import ModelConfig

ROPE = "rope.inv_freq"
"""float32 [head_dim / 2]; computed at conversion, not part of any source."""

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_GGUF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the model, in the order of the converted file, without `ROPE`."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBED: (c.vocab, c.hidden)}
    for layer in range(c.layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (c.hidden,)
        for name, out, into, bias in (
            ("self_attn.q_proj", q, c.hidden, c.qkv_bias),
            ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.v_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.o_proj", c.hidden, q, c.output_bias),
            ("mlp.gate_proj", c.intermediate, c.hidden, c.mlp_bias),
            ("mlp.up_proj", c.intermediate, c.hidden, c.mlp_bias),
            ("mlp.down_proj", c.hidden, c.intermediate, c.mlp_bias),
        ):
            shapes[f"{at}{name}.weight"] = (out, into)
            if bias:
                shapes[f"{at}{name}.bias"] = (out,)
        shapes[at + "post_attention_layernorm.weight"] = (c.hidden,)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied:
        shapes[HEAD] = (c.vocab, c.hidden)
    return shapes


def gguf_name(name: str) -> str:
    """GGUF's name of a canonical tensor."""
    fixed = {EMBED: "token_embd.weight", "model.norm.weight": "output_norm.weight", HEAD: "output.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF[part]}.{kind}"
