"""Loading: one model from a folder and from a GGUF file, converted once, whoever asks at the same time."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engine.rank import convert
from closeranks.engine.rank.convert import cache_key, default_cache, locate, prepare
from closeranks.engine.rank.models.config import UnsupportedModel
from closeranks.engine.rank.settings import Settings
from closeranks.engine.rank.sources.gguf import unpermuted
from closeranks.engine.rank.tensorfile import TensorFile, from_float32, to_float32
from closeranks.engine.rank.weights import load, place

from . import tiny


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write_gguf(path: Path, folder: Path) -> None:
    """A GGUF file (float32) of a tiny Llama folder, as llama.cpp would write it."""
    gguf = pytest.importorskip("gguf")
    from closeranks.engine.rank.models.names import gguf_name

    config = json.loads((folder / "config.json").read_text())
    tensors = TensorFile(folder / "model.safetensors")
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_vocab_size(config["vocab_size"])
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"w{i}" for i in range(config["vocab_size"])])
    w.add_token_types([1] * config["vocab_size"])
    w.add_token_merges(["w 1"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_chat_template("{{ messages }}")
    for name in tensors:
        values = tensors.read(name).copy()
        if ".q_proj." in name:
            values = permuted(values, config["num_attention_heads"])
        if ".k_proj." in name:
            values = permuted(values, config["num_key_value_heads"])
        w.add_tensor(gguf_name(name), values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "hf")


def test_gguf_and_folder_hold_the_same_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", folder)
    # The tokenizer's conversion is transformers' own and takes seconds; the slow test of the default model runs it.
    monkeypatch.setattr(
        "closeranks.engine.rank.sources.gguf.save_tokenizer",
        lambda target, source, **where: (target / "tokenizer.json").write_text(tiny.tokenizer(131)),
    )
    one = tiny.convert(folder, tmp_path / "cache")
    two = tiny.convert(tmp_path / "model.gguf", tmp_path / "cache")
    assert one.path != two.path
    assert one.manifest == two.manifest
    assert one.config == two.config
    assert (two.path / "chat_template.jinja").read_text() == "{{ messages }}"
    a, b = (TensorFile(c.path / "model.safetensors") for c in (one, two))
    assert list(a) == list(b)
    assert all(np.array_equal(a.read(n), b.read(n)) for n in a)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 3))
def test_the_permutation_of_gguf_is_undone(heads: int, half: int, columns: int) -> None:
    values = np.arange(heads * half * 2 * columns, dtype=np.float32).reshape(-1, columns)
    assert np.array_equal(unpermuted(permuted(values, heads), heads), values)


def test_a_model_is_converted_once(folder: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    first = prepare(str(folder), str(tmp_path / "cache"), "float32", notes.append)
    assert any("converting" in n for n in notes)
    notes.clear()
    assert prepare(str(folder), str(tmp_path / "cache"), "float32", notes.append) == first
    assert not notes
    assert prepare(str(folder), str(tmp_path / "cache"), "bfloat16", notes.append).manifest != first.manifest


def test_those_who_ask_at_the_same_time_convert_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    inner = convert.convert

    def counted(*args: Any) -> None:
        started.append("")
        inner(*args)

    monkeypatch.setattr(convert, "convert", counted)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(tiny.convert(folder, tmp_path / "cache"))) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4
    assert len({str(r.path) for r in results}) == 1
    assert len(started) == 1


def test_a_converter_that_died_or_failed_leaves_nothing_that_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    key = cache_key(folder, "float32")
    (cache / f"{key}.part-12345").mkdir(parents=True)
    (cache / f"{key}.part-12345" / "model.safetensors").write_bytes(b"half")

    def full(*args: Any) -> str:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_weights", full)
        with pytest.raises(OSError, match="no space"):
            tiny.convert(folder, cache)
    assert [p.name for p in cache.iterdir()] == [f"{key}.lock"]
    assert tiny.convert(folder, cache).path == cache / key


def test_a_changed_source_is_converted_anew(folder: Path, tmp_path: Path) -> None:
    first = tiny.convert(folder, tmp_path / "cache")
    tiny.write_tensors(folder / "model.safetensors", tiny.weights(tiny.LLAMA, seed=1) | {})
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    second = tiny.convert(folder, tmp_path / "cache")
    assert second.path != first.path
    assert second.manifest.weights != first.manifest.weights
    assert second.manifest.tokenizer == first.manifest.tokenizer
    assert second.config.eos_token_ids == (2, 7)
    assert (second.config.bos_token, second.config.eos_token) == ("w1", "w2")


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("manifest.json", 1),
        ("model.json", 0),
        ("model.safetensors", 1000),
        ("tokenizer.json", 100),
        ("config.json", -1),
    ],
)
def test_a_damaged_conversion_says_which_folder_to_remove(folder: Path, tmp_path: Path, name: str, left: int) -> None:
    """Cut short (a crash of the machine), or gone; not by ranks that fail again and again."""
    path = tiny.convert(folder, tmp_path / "cache").path
    if left < 0:
        (path / name).unlink()
    else:
        os.truncate(path / name, left)
    with pytest.raises(ValueError, match=f"{path} is damaged, remove that folder"):
        tiny.convert(folder, tmp_path / "cache")


def test_sharded_folders_are_read_through_their_index(folder: Path, tmp_path: Path) -> None:
    whole = tiny.convert(folder, tmp_path / "cache")
    tensors = tiny.weights(tiny.LLAMA)
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        tiny.write_tensors(folder / file, {n: tensors[n] for n in part})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: file for file, part in parts.items() for n in part}}))
    assert tiny.convert(folder, tmp_path / "cache").manifest == whole.manifest
    (folder / "b.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"b\.safetensors"):
        tiny.convert(folder, tmp_path / "cache")
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(UnsupportedModel, match="not there"):
        tiny.convert(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}),
            "another architecture",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(3, np.float32)}), r"shape \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(folder: Path, tmp_path: Path, change: Any, says: str) -> None:
    tensors = tiny.weights(tiny.LLAMA)
    change(tensors)
    tiny.write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(UnsupportedModel, match=says):
        tiny.convert(folder, tmp_path / "cache")


def test_a_tied_model_may_carry_its_output_layer_twice(folder: Path, tmp_path: Path) -> None:
    tensors = tiny.weights(tiny.LLAMA)
    tiny.write_tensors(folder / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert tiny.convert(folder, tmp_path / "cache").config.tied


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_rubbish_is_no_tensor_file(tmp_path_factory: pytest.TempPathFactory, rubbish: bytes, head: int) -> None:
    path = tmp_path_factory.mktemp("rubbish") / "x.safetensors"
    path.write_bytes(head.to_bytes(8, "little") + rubbish)
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"x":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F32","shape":[%d],"data_offsets":[0,4]}}' % 2**70,
    ],
)
def test_a_header_beyond_measure_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_file_that_was_cut_short_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        TensorFile(path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    array = np.asarray(values, np.float32)
    theirs = torch.from_numpy(array).bfloat16()
    mine = from_float32(array, "BF16")
    finite = ~np.isnan(array)
    assert np.array_equal(mine[finite], theirs.view(torch.uint16).numpy()[finite])
    torch.testing.assert_close(torch.from_numpy(to_float32(mine, "BF16")), theirs.float(), equal_nan=True)


def test_where_a_model_is_looked_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("").suffix == ".gguf"
    assert locate(str(folder)) == folder
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.gguf").touch()
    assert locate(str(tmp_path / "one")).name == "a.gguf"
    (tmp_path / "one" / "b.gguf").touch()
    (tmp_path / "x.bin").touch()
    for path in ("one", "nowhere", "x.bin"):
        with pytest.raises(UnsupportedModel, match="Supported"):
            locate(str(tmp_path / path))
    with pytest.raises(ValueError, match="dtype"):
        prepare(str(folder), str(tmp_path), "int4", tiny.silent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "closeranks"


def test_a_file_that_is_no_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ValueError, match=r"bad\.gguf"):
        tiny.convert(tmp_path / "bad.gguf", tmp_path / "cache")


def test_load_gives_model_and_fingerprint(folder: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        settings_ = Settings(
            run_dir="", engine="e", model_path=str(folder), cache_dir=str(tmp_path / "cache"), tp_size=3, rank=1
        )
        loaded = load(settings_)
        assert torch.get_num_threads() == 1  # the cores are shared by the ranks
    finally:
        torch.set_num_threads(threads)
    assert loaded.weights == tiny.convert(folder, tmp_path / "cache").manifest.weights
    assert (loaded.dtype, loaded.context_length) == ("float32", 512)
    assert list(loaded.model.shard.kv) == [2]
    assert loaded.model.pages.planes == ("k", "v")


def test_the_converted_folder_describes_itself_in_the_usual_names(folder: Path, tmp_path: Path) -> None:
    path = tiny.convert(folder, tmp_path / "cache").path
    assert json.loads((path / "config.json").read_text()) == {
        "name": "hf",
        "model_type": "llama",
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": [2],
    }
    assert json.loads((path / "tokenizer_config.json").read_text()) == {"bos_token": "w1", "eos_token": "w2"}
    assert (path / "chat_template.jinja").read_text() == "{{ messages }}"
    (folder / "chat_template.jinja").unlink()
    again = tiny.convert(folder, tmp_path / "cache").path
    assert not (again / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("device", "first", "tp_size", "count", "found"),
    [
        ("cpu", 0, 4, 0, ["cpu"] * 4),
        ("cuda", 0, 2, 4, ["cuda:0", "cuda:1"]),
        ("cuda", 2, 2, 4, ["cuda:2", "cuda:3"]),  # decode after prefill
        ("cuda", 2, 2, 3, ["cuda:0", "cuda:1"]),  # too few: it shares prefill's
        ("cuda", 1, 1, 1, ["cuda:0"]),
        ("cuda:1", 0, 2, 3, ["cuda:1", "cuda:2"]),
    ],
)
def test_each_rank_of_a_group_has_a_device_of_its_own(
    device: str, first: int, tp_size: int, count: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [str(place(device, first, rank, tp_size)) for rank in range(tp_size)] == found


@pytest.mark.parametrize(
    ("device", "count", "says"),
    [("cuda", 0, "sees no GPU: give --device cpu"), ("cuda", 1, "need 2 GPUs, there are 1"), ("cuda:3", 4, "need 5")],
)
def test_gpus_that_are_not_there_are_named(device: str, count: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=says):
        place(device, 0, 0, 2)
