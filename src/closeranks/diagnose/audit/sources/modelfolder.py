"""A model or tokenizer folder: config, tokenizer, templates. Reads JSON and text only; weights are never opened."""

import json
from pathlib import Path
from typing import Any

from closeranks.diagnose.audit.model import ModelFolder

FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json")
MAX_BYTES = 64 << 20


class Unreadable(ValueError):
    """A file of the folder that is not what its name says; names it."""


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds a model or a tokenizer."""
    return path.is_dir() and any((path / name).is_file() for name in FILES)


def read(path: Path) -> ModelFolder:
    """What the folder says. Raises `Unreadable`."""
    config, tokenizer = _json(path / "config.json"), _json(path / "tokenizer.json")
    settings, generation = _json(path / "tokenizer_config.json"), _json(path / "generation_config.json")
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    added, ids = _added(tokenizer, settings)
    templates = _templates(path, settings)
    eos_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelFolder(
        path=str(path),
        model_type=str(config.get("model_type", "")),
        architectures=tuple(str(a) for a in _list(config.get("architectures"))),
        vocab_size=_int(config.get("vocab_size", text_config.get("vocab_size") if text_config else None)),
        added=added,
        ids=ids,
        templates=templates,
        eos_tokens=tuple(filter(None, [_text(settings.get("eos_token"))])),
        eos_ids=tuple(i for i in (eos_ids if isinstance(eos_ids, list) else [eos_ids]) if isinstance(i, int)),
        has_tokenizer=bool(tokenizer),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise Unreadable(f"{path.name} has more than {MAX_BYTES >> 20} MiB")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise Unreadable(f"{path.name} holds a {type(data).__name__}, not an object")
    return data


def _added(tokenizer: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, bool], dict[str, int]]:
    """Added tokens with their `special` flag, and the ids of all that are known by name; tokenizer.json wins."""
    added: dict[str, bool] = {}
    ids: dict[str, int] = {}
    decoder = settings.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and "content" in token:
            added[str(token["content"])] = bool(token.get("special"))
            ids[str(token["content"])] = int(number) if str(number).isdecimal() else -1
    for token in _list(tokenizer.get("added_tokens")):
        if isinstance(token, dict) and "content" in token:
            added[str(token["content"])] = bool(token.get("special"))
            number = token.get("id")
            ids[str(token["content"])] = number if isinstance(number, int) else -1
    return added, ids


def _templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    template = settings.get("chat_template")
    if isinstance(template, str):
        found["tokenizer_config.json"] = template
    for item in template if isinstance(template, list) else ():
        if isinstance(item, dict):
            found[f"tokenizer_config.json[{item.get('name')}]"] = str(item.get("template", ""))
    for file in [path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))]:
        if file.is_file() and file.stat().st_size <= MAX_BYTES:
            found[file.name] = file.read_text(encoding="utf-8", errors="replace")
    return found


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None
