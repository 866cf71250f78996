"""SmolLM2 for tests: served from the package's GGUF file, held against `transformers` on the same weights.

`python -m tests.e2e.smollm FOLDER` writes it as a Hugging Face folder, for peers that read no GGUF.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from closeranks.engine.rank.convert import prepare
from closeranks.engine.rank.models.names import ROPE

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "La capital de España es Madrid y la de Portugal es",
    "Столица России —",
    "日本の首都は",
    "مدينة القاهرة هي",
    "1, 1, 2, 3, 5, 8, 13,",
    "🙂 means happy, 🙁 means",
)
LENGTHS = (1, 2, 17, 64, 129, 300, 511, 900, 3000)


def folder(place: Path) -> Path:
    """The default model as a Hugging Face folder in fp32 that `transformers` loads."""
    converted = prepare("")
    c = converted.config
    place.mkdir(parents=True, exist_ok=True)
    tensors = load_file(converted.path / "model.safetensors")
    del tensors[ROPE]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": c.hidden, "vocab_size": c.vocab,
        "intermediate_size": c.intermediate, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": c.tied, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 8192}
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    shutil.copy(converted.path / "tokenizer.json", place)
    shutil.copy(converted.path / "chat_template.jinja", place)
    return place


def prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token lists of every length in `LENGTHS` out of the texts, then the texts, most behind a shared prefix."""
    ids = [encode(text) for text in TEXTS]
    stream: list[int] = []
    while len(stream) < LENGTHS[-1] + len(LENGTHS):
        for text in ids:
            stream += text
    made = [stream[i : i + length] for i, length in enumerate(LENGTHS)]
    shared = stream[100:180]
    return made + ids[:3] + [shared + text for text in ids[3:]]


if __name__ == "__main__":
    folder(Path(sys.argv[1]))
