"""The plug-in inside a running vLLM: a tiny random model on a CPU, made to write what the test wants by a grammar.

Skipped unless CLOSERANKS_VLLM_VENV names an environment with vLLM (`bench/codec_peers/setup.sh DIR`). Takes minutes.
"""

import os
from collections.abc import Iterator

import pytest

from tests.gateway.plugins import engine
from tests.gateway.plugins.engine import BLOCK, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

PLUGIN = "closeranks.gateway.plugins.vllm_parser"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    venv = engine.environment_of("vllm")
    folder = tmp_path_factory.mktemp("model")
    engine.make_model(venv, folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    port = engine.free_port()
    flags = ["--tool-parser-plugin", PLUGIN, "--tool-call-parser", "closeranks_v4", "--enable-auto-tool-choice"]
    flags += ["--reasoning-parser-plugin", PLUGIN, "--reasoning-parser", "closeranks_v4"]
    flags += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", "m"]
    command = [f"{venv}/bin/vllm", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), *flags]
    with engine.running(command, port, environment, folder / "log") as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_engine_answers_with_the_plugin(url: str, stream: bool) -> None:
    def ask(text: str, tools: bool = True) -> dict[str, object]:
        return engine.ask(url, stream=stream, tools=tools, structured_outputs={"choice": [text]})

    call = ("get_weather", '{"city": "Oslo"}')
    assert ask("Hi.\n\n" + BLOCK) == {"content": "Hi.", "calls": [call], "finish": "tool_calls"}
    damaged = BLOCK.replace("tool_calls>\n<", "toolcall\n<", 1)
    assert ask(damaged) == {"content": "", "calls": [call], "finish": "tool_calls"}
    assert ask("Hi </｜DSML｜parameter> there")["content"] == "Hi  there"
    assert ask("Hi.\n\n" + BLOCK, tools=False) == {"content": "Hi.", "calls": [], "finish": "stop"}
