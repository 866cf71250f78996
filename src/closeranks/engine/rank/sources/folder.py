"""Weights from a Hugging Face folder: config.json, *.safetensors (with or without an index), tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..models.config import UnsupportedModel
from ..models.hf import Fields, from_hf, shown
from ..models.names import HEAD, ROPE, expected
from ..tensorfile import TensorFile, to_float32
from . import Source, known_ids


def open_folder(path: Path) -> Source:
    """Raises `UnsupportedModel` for what cannot be run, `ValueError` or `OSError` for damaged files."""
    raw = read_json(path / "config.json")
    if (path / "manifest.json").exists() and "hidden_size" not in raw:
        raise ValueError(f"{path} is what closeranks made of a model: give the folder or file that it was made from")
    config, inv_freq = from_hf(raw, str(path / "config.json"))
    tokenizer = fields(path / "tokenizer_config.json")
    generation = fields(path / "generation_config.json")
    eos = generation.token_ids("eos_token_id")
    if "eos_token_id" in raw or "eos_token_id" not in generation.values:  # else the family's default is not meant
        eos = config.eos_token_ids + eos
    config, warnings = known_ids(
        msgspec.structs.replace(
            config,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token=token_text(tokenizer, "bos_token"),
            eos_token=token_text(tokenizer, "eos_token"),
        ),
        str(path),
    )
    check_tokenizer(path)
    files = weight_files(path)
    where = {name: file for file in files for name in file}
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
        warnings=warnings,
    )


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; `default` where the file is missing."""
    if default is not None and not path.exists():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected")
    return value


def fields(path: Path) -> Fields:
    """The fields of a file that may be missing."""
    return Fields(read_json(path, {}), str(path))


def weight_files(path: Path) -> list[TensorFile]:
    """All weight files that the index names, or that lie there."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        named = Fields(read_json(index), str(index))
        names = sorted({v if isinstance(v, str) else shown(v) for v in named.inner("weight_map").values()})
        missing = [n for n in names if not (path / n).is_file() or Path(n).name != n]
        if missing or not names:
            raise UnsupportedModel(f"{index} names weight files that are not there: {', '.join(missing) or '(none)'}")
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        raise UnsupportedModel(f"no *.safetensors in {path}")
    return [TensorFile(path / n) for n in names]


def token_text(tokenizer: Fields, name: str) -> str:
    """The text of a special token as tokenizer_config.json has it: a string, an object, or null."""
    if isinstance(tokenizer.get(name), dict):
        return Fields(tokenizer.inner(name), f"{tokenizer.where}: {name}").text("content")
    return tokenizer.text(name)


def chat_template(path: Path, tokenizer: Fields) -> str:
    """The template from its own file or from tokenizer_config.json (of several, the one named `default`)."""
    file, name = path / "chat_template.jinja", "chat_template"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{file}: not text in UTF-8: {error}") from error
    source = tokenizer if tokenizer.get(name) else fields(path / "chat_template.json")
    several = source.get(name)
    if not isinstance(several, list):
        return source.text(name)
    if not all(isinstance(t, dict) for t in several):
        raise source.wrong(name, "text, or a list of objects with name and template")
    chosen: dict[str, Any] = next((t for t in several if t.get("name") == "default"), {})
    return Fields(chosen, f"{source.where}: {name}").text("template")


def check_tokenizer(path: Path) -> None:
    """Before the weights are converted: a tokenizer, or what one can be made of."""
    older = ("*.model", "vocab.json", "vocab.txt", "*.tiktoken")
    if not (path / "tokenizer.json").exists() and not any(True for name in older for _ in path.glob(name)):
        raise UnsupportedModel(f"{path} has no tokenizer.json, nor what one is made of ({', '.join(older)})")


def write_tokenizer(path: Path, target: Path) -> None:
    """Copies tokenizer.json, or has transformers make one from older tokenizer files."""
    if (path / "tokenizer.json").exists():
        shutil.copyfile(path / "tokenizer.json", target / "tokenizer.json")
        return
    save_tokenizer(target, str(path))


def save_tokenizer(target: Path, source: str, **where: str) -> None:
    """tokenizer.json through transformers; `where` is passed on (`gguf_file`)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except Exception as error:  # of many kinds, and in many lines
        lines = str(error).split("\n")
        raise UnsupportedModel(
            f"{source} has no tokenizer.json, and transformers makes none of its tokenizer: {' '.join(lines)}"
        ) from error
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise UnsupportedModel(f"the tokenizer of {source} has no fast form (tokenizer.json)")
    fast.save(str(target / "tokenizer.json"))
