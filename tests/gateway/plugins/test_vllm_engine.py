"""The plug-in inside a running vLLM: a tiny random model on a CPU, made to write what the test wants by a grammar.

Skipped unless CLOSERANKS_VLLM_VENV names an environment with vLLM (`bench/codec_peers/setup.sh DIR`). Takes minutes.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PLUGIN = "closeranks.gateway.plugins.vllm_parser"
BLOCK = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
    tie_word_embeddings=True, bos_token_id=256, eos_token_id=257, pad_token_id=257)).save_pretrained(sys.argv[1])
"""


def write_tokenizer(folder: Path) -> None:
    """A token per byte, ChatML's markers and the think tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{{ '<think>' if thinking else '</think>' }}"
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    venv = os.environ.get("CLOSERANKS_VLLM_VENV")
    if not venv:
        pytest.skip("CLOSERANKS_VLLM_VENV names no environment with vllm (bench/codec_peers/setup.sh makes one)")
    folder = tmp_path_factory.mktemp("model")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([f"{venv}/bin/python", "-c", MAKE_MODEL, str(folder)], env=environment, check=True, timeout=300)
    write_tokenizer(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--tool-parser-plugin", PLUGIN, "--tool-call-parser", "closeranks_v4", "--enable-auto-tool-choice"]
    flags += ["--reasoning-parser-plugin", PLUGIN, "--reasoning-parser", "closeranks_v4"]
    flags += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", "m"]
    command = [f"{venv}/bin/vllm", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), *flags]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, (folder / "log").read_text()[-3000:]
                assert time.monotonic() < until, "vLLM is not ready:\n" + (folder / "log").read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)


def ask(url: str, text: str, stream: bool, tools: bool = True) -> dict[str, Any]:
    """What a client gets if the model writes `text`."""
    offered = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        **({"tools": offered} if tools else {}),
        "stream": stream,
        "max_tokens": 600,
        "structured_outputs": {"choice": [text]},
        "chat_template_kwargs": {"thinking": False},
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as answer:
        raw = answer.read().decode()
    if not stream:
        choices = [{**c, "delta": c["message"]} for c in json.loads(raw)["choices"]]
    else:
        chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    content, finish, calls = "", None, {}
    for choice in choices:
        content += choice["delta"].get("content") or ""
        finish = choice.get("finish_reason") or finish
        for number, call in enumerate(choice["delta"].get("tool_calls") or ()):
            entry = calls.setdefault(call.get("index", number), ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
    return {"content": content, "calls": [tuple(call) for call in calls.values()], "finish": finish}


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_engine_answers_with_the_plugin(url: str, stream: bool) -> None:
    call = ("get_weather", '{"city": "Oslo"}')
    assert ask(url, "Hi.\n\n" + BLOCK, stream) == {"content": "Hi.", "calls": [call], "finish": "tool_calls"}
    damaged = BLOCK.replace("tool_calls>\n<", "toolcall\n<", 1)
    assert ask(url, damaged, stream) == {"content": "", "calls": [call], "finish": "tool_calls"}
    assert ask(url, "Hi </｜DSML｜parameter> there", stream)["content"] == "Hi  there"
    assert ask(url, "Hi.\n\n" + BLOCK, stream, tools=False) == {"content": "Hi.", "calls": [], "finish": "stop"}
