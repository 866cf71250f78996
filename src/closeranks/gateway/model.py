"""What the gateway knows of a model: tokenizer, vocabulary, chat template, limits. Read from the converted folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from closeranks.codec.encoder import EncodeError, Encoder, Prompt, PromptTokenizer, encoder_for, token_ids
from closeranks.codec.template import TemplateEncoder
from closeranks.gateway.detokenize import Vocabulary


class ModelError(ValueError):
    """The model folder lacks something or has it in a form that cannot be used; the text names file and reason."""


@dataclass(frozen=True, slots=True)
class Model:
    """`vocab_size`: ids below it may be fed to the engine. `stop_ids`: the ids that end an answer. `tokenizer_hash`: as
    engines have it in their fingerprint; empty in a folder without `manifest.json`, which was not converted."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    tokenizer_hash: str
    vocabulary: Vocabulary
    prompt_tokenizer: PromptTokenizer
    encoder: Encoder | None
    """Writes conversations as prompts; None: the model has no chat template."""
    shows_tools: bool
    """Whether it writes tools and calls into them; many templates of small models leave them out."""
    vocab_size: int
    context_length: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids. `special`: with what the tokenizer adds around a whole text, e.g. BOS."""
        return token_ids(self.tokenizer, text, special)

    def added_tokens(self) -> dict[str, int]:
        """Text to id."""
        return {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()}

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a rendered conversation, in which no text of the request becomes a control token."""
        return self.prompt_tokenizer.ids(prompt)


def load(folder: str | Path, name: str = "", chat_template: str = "", dialect: str = "") -> Model:
    """Read a model folder. `dialect`: how prompts are written where there is no chat template. Raises ModelError."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        vocabulary = Vocabulary(tokenizer)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    prompt_tokenizer = PromptTokenizer(tokenizer)
    config = _json(folder / "config.json")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    generation = _json(folder / "generation_config.json")
    vocab_size = int(config.get("vocab_size") or len(vocabulary))
    stop_ids = _stop_ids(tokenizer, config, generation, tokenizer_config)
    encoder, shows_tools = _encoder(folder, tokenizer_config, chat_template, prompt_tokenizer.added_tokens, dialect)
    return Model(
        name=name or str(config.get("name") or config.get("_name_or_path") or folder.name),
        folder=folder,
        tokenizer=tokenizer,
        tokenizer_hash=str(_json(folder / "manifest.json").get("tokenizer") or ""),
        vocabulary=vocabulary,
        prompt_tokenizer=prompt_tokenizer,
        encoder=encoder,
        shows_tools=shows_tools,
        vocab_size=vocab_size,
        context_length=int(config.get("max_position_embeddings") or 0),
        stop_ids=tuple(number for number in stop_ids if 0 <= number < vocab_size),  # others can never be sampled
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected an object")
    return found


def _encoder(
    folder: Path, config: dict[str, Any], chosen: str, added: frozenset[str], dialect: str
) -> tuple[Encoder | None, bool]:
    """The encoder, and whether it shows tools."""
    path = Path(chosen) if chosen else folder / "chat_template.jinja"
    source: Any
    if chosen or path.is_file():
        try:
            source = path.read_text()
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
    else:
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = {t.get("name"): t.get("template") for t in source}.get("default")
    if not isinstance(source, str):
        try:
            return (encoder_for(dialect) if dialect in ("v32", "v4", "v41") else None), True
        except EncodeError as error:
            raise ModelError(str(error)) from error
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: text for name in names if (text := _text(config, name))}
    try:
        return TemplateEncoder(source, special, added), "tools" in source
    except EncodeError as error:
        raise ModelError(f"{path}: {error}") from error


def _text(config: dict[str, Any], key: str) -> str:
    token = config.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _stop_ids(tokenizer: Tokenizer, *configs: dict[str, Any]) -> tuple[int, ...]:
    """EOS by whichever file names it: as ids or as the token's text."""
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
        named = tokenizer.token_to_id(_text(config, "eos_token")) if _text(config, "eos_token") else None
        if named is not None:
            found.add(named)
    return tuple(sorted(found))
