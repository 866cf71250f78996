"""What is read from a model's JSON files: as transformers reads it, or an error that names file and field."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from closeranks.engine.rank import convert
from closeranks.engine.rank.convert import open_source, prepare
from closeranks.engine.rank.models.config import ModelConfig, UnsupportedModel
from closeranks.engine.rank.models.hf import DEFAULTS, from_hf, inverse_frequencies
from closeranks.engine.rank.models.names import expected
from closeranks.engine.rank.models.shard import Shard
from closeranks.engine.rank.sources import known_ids
from closeranks.engine.rank.sources.gguf import OWN, SPECIAL, read_config

from . import tiny

FIELDS = [
    *("model_type", "hidden_act", "quantization_config", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "sliding_window", "use_sliding_window", "rms_norm_eps", "bos_token_id"),
    *("eos_token_id", "attention_bias", "mlp_bias", "num_hidden_layers", "intermediate_size", "vocab_size"),
    *("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    "original_max_position_embeddings",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 10**400, 2**31, 2**63, 2.0, 2.7, 1e-300, 1e300, "", "2", "yarn"])
    | st.floats()
    | st.text(max_size=5)
)
JSON = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=5
)


def theirs(config: dict[str, Any]) -> Any:
    """What transformers makes of a config.json."""
    from transformers import AutoConfig

    values = dict(config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def check_same(config: dict[str, Any]) -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    mine, frequencies = from_hf(config)
    known = theirs(config)
    assert (mine.layers, mine.hidden, mine.heads, mine.kv_heads, mine.intermediate, mine.vocab) == (
        known.num_hidden_layers,
        known.hidden_size,
        known.num_attention_heads,
        known.num_key_value_heads,
        known.intermediate_size,
        known.vocab_size,
    )
    assert mine.head_dim == (getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads)
    assert mine.norm_eps == known.rms_norm_eps
    assert mine.tied == known.tie_word_embeddings
    window = None if mine.architecture == "llama" else known.sliding_window
    assert mine.context_length == min(known.max_position_embeddings, window or math.inf)
    assert mine.bos_token_id == (-1 if known.bos_token_id is None else known.bos_token_id)
    eos = known.eos_token_id
    assert mine.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    if mine.architecture == "llama":
        assert (mine.qkv_bias, mine.output_bias, mine.mlp_bias) == (
            known.attention_bias,
            known.attention_bias,
            known.mlp_bias,
        )
    else:
        assert (mine.qkv_bias, mine.output_bias, mine.mlp_bias) == (mine.architecture == "qwen2", False, False)
    assert torch.equal(torch.tensor(frequencies), LlamaRotaryEmbedding(known).inv_freq)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_an_absent_field_is_what_it_is_in_transformers(kind: str) -> None:
    """Mistral without `sliding_window` has a window of 4,096; only `null` says that there is none."""
    check_same({"model_type": kind})
    full = tiny.LLAMA | {"model_type": kind, "sliding_window": None, "attention_bias": False, "head_dim": 8}
    for field in full.keys() - {"model_type"}:
        check_same({name: value for name, value in full.items() if name != field} | {"num_key_value_heads": 8})
    check_same({"model_type": kind, "sliding_window": None})
    check_same({"model_type": kind, "sliding_window": None, "use_sliding_window": True})
    check_same({"model_type": kind, "use_sliding_window": True})
    assert from_hf({"model_type": kind, "num_key_value_heads": None})[0].kv_heads == 32


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": tiny.LLAMA3, "rope_theta": 5e5},
        {"rope_parameters": tiny.LLAMA3 | {"rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_scaling": {k: v for k, v in tiny.LLAMA3.items() if k != "original_max_position_embeddings"}},
        {"rope_scaling": tiny.LLAMA3, "original_max_position_embeddings": 256},
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 3e4}},
    ],
)
def test_rope_is_read_from_where_transformers_reads_it(rope: dict[str, Any]) -> None:
    check_same({"model_type": "llama", "max_position_embeddings": 512} | rope)


def refused(work: Callable[[], object]) -> str:
    """The error that `work` ends with; empty: it has none."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def check_sound(config: ModelConfig, frequencies: list[float]) -> None:
    assert expected(config)
    assert Shard.of(config, 0, 1).vocab == range(config.vocab)
    assert len(frequencies) == config.head_dim // 2
    assert all(0 < f < math.inf for f in frequencies)
    config, _ = known_ids(config, "here")
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config
    assert all(0 <= i < config.vocab for i in config.eos_token_ids)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(DEFAULTS)), st.sampled_from(FIELDS), JSON)
@example("llama", "num_hidden_layers", 2.7)
@example("llama", "num_hidden_layers", True)
@example("llama", "num_hidden_layers", 10**9)
@example("llama", "rope_theta", 0)
@example("llama", "rope_theta", math.nan)
@example("llama", "rope_scaling", [1])
@example("llama", "rope_scaling", "yarn")
@example("llama", "rope_scaling", {"type": "linear", "factor": 0.0})
@example("llama", "rope_parameters", {"full_attention": {"rope_type": "yarn"}})
@example("llama", "max_position_embeddings", 1)
@example("mistral", "sliding_window", 0)
@example("llama", "eos_token_id", [True])
def test_any_value_of_any_field_gives_a_sound_config_or_an_error_that_names_it(
    kind: str, field: str, value: Any
) -> None:
    config = tiny.LLAMA | {"model_type": kind, "use_sliding_window": True, "sliding_window": None} | {field: value}
    said = refused(lambda: check_sound(*from_hf(config, "folder/config.json")))
    if said:
        assert said.startswith("folder/config.json: ")
        assert field in said
        assert len(said) < 600


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["rope_type", "type", "rope_theta", *tiny.LLAMA3]), JSON, st.sampled_from(["llama3", "linear"]))
def test_any_value_in_the_rope_parameters_is_read_or_named(field: str, value: Any, kind: str) -> None:
    config = tiny.LLAMA | {"rope_scaling": tiny.LLAMA3 | {"rope_type": kind, field: value}}
    said = refused(lambda: check_sound(*from_hf(config)))
    assert not said or ("rope_scaling: " in said and field in said)


GGUF = {
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 100,
    "llama.context_length": 512,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 2.0,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*(f"llama.{name}" for name in OWN), *SPECIAL, "tokenizer.ggml.tokens"]), JSON)
def test_any_value_of_gguf_metadata_is_read_or_named(field: str, value: Any) -> None:
    def check() -> None:
        config, rope = read_config("llama", (GGUF | {field: value}).get, set(), "a.gguf")
        check_sound(config, inverse_frequencies(config.head_dim, rope))

    said = refused(check)
    short = field.removeprefix("llama.").removeprefix("attention.")
    ours = {"embedding_length": "head dimension", "head_count": "heads", "head_count_kv": "heads"}
    ours |= {"key_length": "head dimension", "context_length": "context", "sliding_window": "context"}
    assert not said or short in said or ours[short] in said
    assert not refused(lambda: read_config("llama", GGUF.get, set(), "a.gguf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "hf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(
        [
            ("generation_config.json", "eos_token_id"),
            ("tokenizer_config.json", "bos_token"),
            ("tokenizer_config.json", "chat_template"),
            ("chat_template.json", "chat_template"),
            ("model.safetensors.index.json", "weight_map"),
        ]
    ),
    JSON | st.fixed_dictionaries({"content": JSON}) | st.lists(st.fixed_dictionaries({"name": JSON, "template": JSON})),
)
@example(("generation_config.json", "eos_token_id"), "x")
@example(("model.safetensors.index.json", "weight_map"), [1])
@example(("tokenizer_config.json", "bos_token"), ["x"])
@example(("tokenizer_config.json", "chat_template"), 5)
@example(("tokenizer_config.json", "chat_template"), [{"name": "default", "template": 5}])
def test_any_value_in_the_other_files_is_read_or_named(folder: Path, at: tuple[str, str], value: Any) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    name, field = at
    file = folder / name
    before = file.read_bytes() if file.exists() else None
    file.write_text(json.dumps({field: value}))

    def check() -> None:
        source = open_source(folder)
        assert isinstance(source.chat_template, str)
        assert isinstance(source.config.bos_token, str)
        msgspec.json.encode(source.config)

    try:
        said = refused(check)
    finally:
        file.unlink() if before is None else file.write_bytes(before)
    assert not said or (name in said and (field in said or "names weight files" in said))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ messages }}", "not text in UTF-8"),
        ("config.json", b"", "not JSON"),
        ("config.json", b"[" * 100_000, "not JSON"),
        ("generation_config.json", b"[]", "a JSON object is expected"),
        ("tokenizer.json", b"{", "its tokenizer.json is no tokenizer"),
        ("tokenizer.json", b'{"a": 1}', "its tokenizer.json is no tokenizer"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, file: str, content: bytes, says: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{folder}(/{file})?: {says}"):
        tiny.convert(folder, tmp_path / "cache")


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text(tiny.tokenizer(133))
    notes: list[str] = []
    prepare(str(folder), str(tmp_path / "cache"), "float32", notes.append)
    assert [n for n in notes if "warning" in n] == [
        f"warning: {folder}: its tokenizer has 2 tokens outside of the model's vocabulary of 131, "
        "the first is 'w131' (131): no prompt can hold them"
    ]


@pytest.mark.parametrize("left", ["", "vocab.json"])
def test_a_folder_without_a_tokenizer_is_named(folder: Path, tmp_path: Path, left: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    if left:
        (folder / left).write_text("{")
    with pytest.raises(UnsupportedModel, match=f"{folder} has no tokenizer.json") as caught:
        tiny.convert(folder, tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "generation", "kept", "says"),
    [
        ({"eos_token_id": 99999}, {}, (), "eos_token_id 99999 is outside of the vocabulary of 131, left out; no other"),
        ({"eos_token_id": [2, 131]}, {}, (2,), "eos_token_id 131 is outside"),
        ({"eos_token_id": -1}, {"eos_token_id": 130}, (130,), "eos_token_id -1 is outside"),
        ({}, {"eos_token_id": 10**30}, (2,), f"eos_token_id {10**30} is outside"),
        ({"bos_token_id": 131}, {}, (2,), "bos_token_id 131 is outside"),
        ({}, {"eos_token_id": [3, 2]}, (2, 3), ""),
    ],
)
def test_special_tokens_that_the_vocabulary_lacks_are_left_out_with_a_word(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], kept: tuple[int, ...], says: str
) -> None:
    """No token of that id can be sampled, and every request with a grammar would end the epoch."""
    folder = tiny.folder(tmp_path / "hf", **config)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    notes: list[str] = []
    found = prepare(str(folder), str(tmp_path / "cache"), "float32", notes.append)
    assert found.config.eos_token_ids == kept
    warnings = [note for note in notes if note.startswith("warning: ")]
    assert [says in warning and str(folder) in warning for warning in warnings] == [True] * bool(says)


def test_the_family_s_end_of_text_is_not_added_to_what_the_generation_config_says(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_source(folder).config.eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert open_source(folder).config.eos_token_ids == (9,)


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"cache folder {tmp_path / 'file'} takes no converted model: File exists"):
        tiny.convert(folder, tmp_path / "file")

    def full(*args: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, "write_weights", full)
    with pytest.raises(
        OSError, match=f"cache folder {tmp_path / 'cache'} takes no converted model: No space"
    ) as caught:
        tiny.convert(folder, tmp_path / "cache")
    assert caught.value.errno == errno.ENOSPC
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(IsADirectoryError, match=str(folder / "config.json")):
        tiny.convert(folder, tmp_path / "cache")
