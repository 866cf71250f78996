"""A tiny model folder: byte-level BPE with a few merges, two special tokens, a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if tools %}{{ 'tools: ' + (tools | tojson) + '\\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

UNLEARNED = "<|unlearned|>"
"""A token that somebody added to the tokenizer after the model had been trained; beyond its vocabulary."""


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    merges = []
    for word in ("he", "hel", "hell", "hello", "Ġw", "Ġwo", "st", "sto", "stop", "ðŁ", "ðŁĺ"):
        left, right = word[:-1], word[-1]
        merges.append((left, right))
        vocabulary[word] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", UNLEARNED)
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    return made


def write(folder: Path, context_length: int = 512) -> Path:
    """The folder as the rank side converts it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    end = made.token_to_id("<|im_end|>")
    size = made.get_vocab_size() - 1
    config = {"vocab_size": size, "max_position_embeddings": context_length, "eos_token_id": [end, 99_999]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"tokenizer": "tokenizer"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder
