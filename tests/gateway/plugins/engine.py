"""A real engine as a child process. Its model is tiny and random; a grammar makes it write what a test wants."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).parents[3]
BLOCK = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
THINK_CLOSE_ID = 259
MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
    tie_word_embeddings=True, bos_token_id=256, eos_token_id=257, pad_token_id=257)).save_pretrained(sys.argv[1])
"""


def environment_of(engine: str) -> str:
    """The engine's virtual environment; skips the test where none is named."""
    variable = f"CLOSERANKS_{engine.upper()}_VENV"
    venv = os.environ.get(variable)
    if not venv:
        pytest.skip(f"{variable} names no environment with {engine} (bench/codec_peers/setup.sh makes one)")
    return venv


def make_model(venv: str, folder: Path) -> None:
    """A Llama of random weights and its tokenizer: a token per byte, ChatML's markers and the think tags."""
    subprocess.run([f"{venv}/bin/python", "-c", MAKE_MODEL, str(folder)], check=True, timeout=900)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    assert tokenizer.token_to_id("</think>") == THINK_CLOSE_ID
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


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, environment: dict[str, str], log: Path) -> Iterator[str]:
    """Start an engine in a process group of its own and wait for its health; the URL of its chat completions."""
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + 1800
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, "the engine is not ready:\n" + log.read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)


def ask(url: str, *, stream: bool, tools: bool = True, thinking: bool = False, **more: Any) -> dict[str, Any]:
    """What a client gets. `more`: members of the request, among them what holds the model to its text."""
    offered = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        **({"tools": offered} if tools else {}),
        "stream": stream,
        "max_tokens": 600,
        "chat_template_kwargs": {"thinking": thinking},
        **more,
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        raw = answer.read().decode()
    if not stream:
        choices = [{**c, "delta": c["message"]} for c in json.loads(raw)["choices"]]
    else:
        chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    content, reasoning, finish, calls = "", "", None, {}
    for choice in choices:
        content += choice["delta"].get("content") or ""
        reasoning += choice["delta"].get("reasoning_content") or choice["delta"].get("reasoning") or ""
        finish = choice.get("finish_reason") or finish
        for number, call in enumerate(choice["delta"].get("tool_calls") or ()):
            entry = calls.setdefault(call.get("index", number), ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""
    found = {"content": content, "calls": [tuple(call) for call in calls.values()], "finish": finish}
    return {**found, "reasoning": reasoning} if reasoning else found
