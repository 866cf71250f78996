"""The model against transformers on the same weights, whatever the batch, chunks, pages and ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.engine.rank.convert import prepare
from closeranks.engine.rank.kernels.plain import PackedKernels, PlainKernels
from closeranks.engine.rank.models.config import ModelConfig, UnsupportedModel
from closeranks.engine.rank.models.hf import from_hf
from closeranks.engine.rank.models.shard import Shard
from closeranks.protocol import Begin, Row, Sampling, Step

from . import tiny

torch.set_num_threads(1)

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_scaling": tiny.LLAMA3, "rope_theta": 500000.0, "head_dim": 24},
    "linear rope, no groups": {"num_key_value_heads": 8, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
}
PROMPTS = [[5, 9, 100], [7] * 33, list(range(3, 120)), [1]]


class Reference:
    """transformers on a model folder."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab]"""
        result: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return result

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        """The continuation, and a check that no choice was a close call."""
        tokens = list(prompt)
        for _ in range(new):
            best = self.logits(tokens)[-1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "choose another seed: the reference itself is undecided"
            tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = tiny.folder(tmp_path_factory.mktemp("model") / "hf", **KINDS[request.param])
    return path, Reference(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The plain tiny Llama and its greedy continuations of PROMPTS."""
    path = tiny.folder(tmp_path_factory.mktemp("model") / "hf")
    reference = Reference(path)
    return path, [reference.greedy(p, 8) for p in PROMPTS]


def logits_of(path: Path, tokens: list[int], size: int) -> torch.Tensor:
    """Logits of every position, each computed by a step of its own after chunks of uneven size."""
    converted = tiny.convert(path, path.parent / "cache")

    def work(group: Any) -> torch.Tensor | None:
        run = tiny.runner(tiny.model(converted, group.rank, size), group, page_size=4)
        seen: list[torch.Tensor] = []
        inner = group.gather

        def gather(t: torch.Tensor) -> list[torch.Tensor] | None:
            parts: list[torch.Tensor] | None = inner(t)
            if parts is not None:
                seen.append(torch.cat(parts, -1))
            return parts

        group.gather = gather
        for end in range(1, len(tokens) + 1, 9):
            begin = Begin(Sampling(), tokens[:end], end, list(range(32))[:: -1 if end % 2 else 1])
            half = end // 2
            if half:
                run.run(Step(1, 1, [Row(0, 0, half, begin=begin)]))
            run.run(Step(1, 1, [Row(0, half, end - half, sample=True, begin=None if half else begin)]))
        return torch.cat(seen) if seen else None

    result = tiny.on_ranks(size, work)[0]
    assert result is not None
    return result


def test_logits_are_those_of_transformers(kind: tuple[Path, Reference]) -> None:
    path, reference = kind
    tokens = [(7 * i * i + 3 * i) % 131 for i in range(100)]
    expected = reference.logits(tokens)[::9]
    torch.testing.assert_close(logits_of(path, tokens, 1), expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits_of(path, tokens, 2), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("size", "chunk", "page_size"), [(1, 1, 16), (1, 5, 1), (1, 64, 16), (2, 64, 5), (3, 17, 4), (4, 64, 16)]
)
def test_any_schedule_gives_the_greedy_text(
    llama: tuple[Path, list[list[int]]], size: int, chunk: int, page_size: int
) -> None:
    path, texts = llama
    converted = tiny.convert(path, path.parent / "cache")
    pages = 256 // page_size + 16

    def work(group: Any) -> list[list[int]]:
        run = tiny.runner(tiny.model(converted, group.rank, size), group, pages, page_size)
        return tiny.serve(run.run, PROMPTS, 8, chunk, page_size, pages, seed=chunk)

    for result in tiny.on_ranks(size, work):  # the tokens are known on every rank
        assert result == texts


@pytest.mark.parametrize("kernels", [PlainKernels, PackedKernels])
def test_plain_kernels_give_the_greedy_text(llama: tuple[Path, list[list[int]]], kernels: type[PlainKernels]) -> None:
    path, texts = llama
    run = tiny.runner(tiny.model(tiny.convert(path, path.parent / "cache"), kernels=kernels()), tiny.Solo())
    assert tiny.serve(run.run, PROMPTS, 8, 64, 4, 128) == texts


def test_bfloat16_runs_and_stays_near(llama: tuple[Path, list[list[int]]]) -> None:
    path, _ = llama
    tokens = list(range(40, 77))
    wide = logits_of(path, tokens, 1)
    narrow_model = tiny.model(tiny.convert(path, path.parent / "cache", "bfloat16"))
    run = tiny.runner(narrow_model, tiny.Solo())
    assert run.pool.tensor.dtype == torch.bfloat16
    seen: list[torch.Tensor] = []
    run.group.gather = lambda t: (seen.append(t), [t])[1]  # type: ignore[method-assign]
    run.run(Step(1, 1, [Row(0, 0, 37, sample=True, begin=Begin(Sampling(), tokens, 37, list(range(10))))]))
    assert seen[0].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(seen[0][0], wide[-1], dim=0) > 0.99


def test_every_head_and_column_is_dealt_once() -> None:
    config, _ = from_hf(tiny.LLAMA | KINDS["uneven"])
    for size in (1, 2, 3):
        shards = [Shard.of(config, rank, size) for rank in range(size)]
        for part, n in (("kv", 3), ("heads", 9), ("mlp", 100), ("vocab", 131)):
            assert [i for s in shards for i in getattr(s, part)] == list(range(n)), part
        for s in shards:
            assert [h // 3 for h in s.heads] == [g for g in s.kv for _ in range(3)]
    assert [len(Shard.of(config, r, 2).kv) for r in (0, 1)] == [2, 1]
    with pytest.raises(ValueError, match="3 KV heads"):
        Shard.of(config, 0, 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"hidden_size": "many"}, "config.json"),
        ({"vocab_size": None}, "config.json"),
    ],
)
def test_what_cannot_be_run_is_refused_and_what_can_is_listed(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says) as caught:
        from_hf(tiny.LLAMA | changes)
    assert "Supported: Llama" in str(caught.value)


def test_a_sliding_window_limits_the_context() -> None:
    assert from_hf(tiny.LLAMA | KINDS["mistral"] | {"sliding_window": 100})[0].context_length == 100
    qwen = tiny.LLAMA | KINDS["qwen2"] | {"sliding_window": 100}
    assert from_hf(qwen)[0].context_length == 512


def test_the_norm_epsilon_of_both_sources_is_one() -> None:
    config = from_hf(tiny.LLAMA | {"rms_norm_eps": 9.999999747378752e-06})[0]
    assert isinstance(config, ModelConfig)
    assert config.norm_eps == 1e-5


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    converted = prepare("", str(tmp_path), "float32", tiny.silent)
    text = tokenizers.Tokenizer.from_file(str(converted.path / "tokenizer.json"))
    prompt = text.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids

    def work(group: Any) -> list[list[int]]:
        run = tiny.runner(tiny.model(converted, group.rank, group.size), group, 16, 16)
        run.warm_up(16)
        return tiny.serve(run.run, [prompt], 8, 64, 16, 16)

    for size in (1, 2):
        results: list[Any] = tiny.on_ranks(size, work)
        assert text.decode(results[0][0], skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
