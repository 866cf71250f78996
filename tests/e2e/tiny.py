"""A random Llama of 2 layers with 8 query and 4 KV heads, as a Hugging Face folder: made in a second, runs anywhere.

The vocabulary is a byte-level one of 512 entries, so that any token list is text and back.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
CONTEXT = 4096
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path, seed: int = 0) -> Path:
    """Write the model to `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads, kv, size = 128, 256, 8, 4, 16

    def weight(*shape: int) -> torch.Tensor:
        # wide enough that the two best logits are rarely close: a random model is otherwise all near-ties
        return torch.randn(*shape, generator=generator) * (1.6 / shape[-1] ** 0.5)

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(VOCABULARY, hidden) * 2,
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            layer + "post_attention_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            layer + "self_attn.q_proj.weight": weight(heads * size, hidden),
            layer + "self_attn.k_proj.weight": weight(kv * size, hidden),
            layer + "self_attn.v_proj.weight": weight(kv * size, hidden),
            layer + "self_attn.o_proj.weight": weight(hidden, heads * size),
            layer + "mlp.gate_proj.weight": weight(inner, hidden),
            layer + "mlp.up_proj.weight": weight(inner, hidden),
            layer + "mlp.down_proj.weight": weight(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>", "chat_template": CHAT_TEMPLATE})
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def tokenizer() -> Tokenizer:
    """Bytes, a few frequent pairs, and the special tokens."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    merges = []
    letters = "etaoinshrdlu"
    for pair in ((a, b) for a in letters for b in letters):
        if len(vocabulary) < VOCABULARY:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(pair)
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<unused{len(vocabulary)}>"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    return made
