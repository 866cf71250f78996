"""Weights from a Hugging Face folder: config.json, *.safetensors (with or without an index), tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..models.config import UnsupportedModel, from_hf
from ..models.names import HEAD, ROPE, expected
from ..tensorfile import TensorFile, to_float32
from . import Source


def open_folder(path: Path) -> Source:
    """Raises `UnsupportedModel` for what cannot be run, `ValueError` or `OSError` for damaged files."""
    raw = read_json(path / "config.json")
    config, inv_freq = from_hf(raw)
    tokenizer = read_json(path / "tokenizer_config.json", {})
    generation = read_json(path / "generation_config.json", {})
    also = generation.get("eos_token_id")
    eos = [*config.eos_token_ids, *(also if isinstance(also, list) else [] if also is None else [also])]
    config = msgspec.structs.replace(
        config,
        eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos)),
        bos_token=token_text(tokenizer.get("bos_token")),
        eos_token=token_text(tokenizer.get("eos_token")),
    )
    files = weight_files(path)
    where = {name: file for file in files for name in file}
    if config.tied and HEAD in where and "tie_word_embeddings" not in raw:
        config = msgspec.structs.replace(config, tied=False)
    known = {*expected(config), HEAD, ROPE}

    def read(name: str) -> npt.NDArray[np.float32]:
        file = where[name]
        return to_float32(file.read(name), file.dtype(name))

    return Source(
        config=config,
        inv_freq=inv_freq,
        read=read,
        unknown=sorted(n for n in where if n not in known and not n.endswith("rotary_emb.inv_freq")),
        write_tokenizer=lambda target: write_tokenizer(path, target),
        chat_template=chat_template(path, tokenizer),
    )


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; `default` where the file is missing."""
    if default is not None and not path.exists():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected")
    return value


def weight_files(path: Path) -> list[TensorFile]:
    """All weight files that the index names, or that lie there."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted({str(v) for v in read_json(index).get("weight_map", {}).values()})
        missing = [n for n in names if not (path / n).is_file() or Path(n).name != n]
        if missing or not names:
            raise UnsupportedModel(f"{index} names weight files that are not there: {', '.join(missing) or '(none)'}")
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        raise UnsupportedModel(f"no *.safetensors in {path}")
    return [TensorFile(path / n) for n in names]


def token_text(token: Any) -> str:
    """The text of a special token as tokenizer_config.json has it: a string, an object, or null."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def chat_template(path: Path, tokenizer: dict[str, Any]) -> str:
    """The template from its own file or from tokenizer_config.json (of several, the one named `default`)."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = tokenizer.get("chat_template") or read_json(path / "chat_template.json", {}).get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return str(template or "")


def write_tokenizer(path: Path, target: Path) -> None:
    """Copies tokenizer.json, or has transformers make one from older tokenizer files."""
    if (path / "tokenizer.json").exists():
        shutil.copyfile(path / "tokenizer.json", target / "tokenizer.json")
        return
    save_tokenizer(target, str(path))


def save_tokenizer(target: Path, source: str, **where: str) -> None:
    """tokenizer.json through transformers; `where` is passed on (`gguf_file`)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise UnsupportedModel(f"the tokenizer of {source} has no fast form (tokenizer.json)")
    fast.save(str(target / "tokenizer.json"))
