"""The plug-in inside a running SGLang: a tiny random model on a CPU, made to write what the test wants by a grammar.

Skipped unless CLOSERANKS_SGLANG_ENGINE_VENV names an environment in which SGLang serves on this machine. (The one that
`bench/codec_peers/setup.sh` makes has its parser modules only: SGLang itself requires CUDA builds.) Takes minutes.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.plugins import engine
from tests.gateway.plugins.engine import BLOCK, ROOT, THINK_CLOSE_ID

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

OSLO = ("get_weather", '{"city": "Oslo"}')


def installed(folder: Path) -> Path:
    """What an installation of closeranks tells Python about its plug-ins, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "closeranks-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: closeranks\nVersion: 0\n")
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    venv = engine.environment_of("sglang_engine")
    folder = tmp_path_factory.mktemp("model")
    engine.make_model(venv, folder)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{installed(tmp_path_factory.mktemp('installed'))}",
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    port = engine.free_port()
    flags = ["--tool-call-parser", "closeranks-v4", "--reasoning-parser", "closeranks-v4"]
    flags += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    flags += ["--sampling-backend", "pytorch", "--grammar-backend", "xgrammar", "--skip-server-warmup"]
    flags += ["--max-total-tokens", "8192", "--mem-fraction-static", "0.1", "--disable-custom-all-reduce"]
    flags += ["--disable-overlap-schedule", "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command = [f"{venv}/bin/python", "-m", "sglang.launch_server", "--model-path", str(folder), *flags]
    with engine.running(command, port, environment, folder / "log") as url:
        yield url


def only(text: str) -> str:
    """A grammar of one text."""
    return f"root ::= {json.dumps(text, ensure_ascii=False)}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_engine_answers_with_the_plugin(url: str, stream: bool) -> None:
    def ask(text: str, tools: bool = True) -> dict[str, object]:
        return engine.ask(url, stream=stream, tools=tools, ebnf=only(text))

    assert ask("Hi.\n\n" + BLOCK) == {"content": "Hi.", "calls": [OSLO], "finish": "tool_calls"}
    damaged = BLOCK.replace("tool_calls>\n<", "toolcall\n<", 1)
    assert ask(damaged) == {"content": "", "calls": [OSLO], "finish": "tool_calls"}
    assert ask("Hi </｜DSML｜parameter> there")["content"] == "Hi  there"
    assert ask("Hi.\n\n" + BLOCK, tools=False)["calls"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_behind_reasoning(url: str, stream: bool) -> None:
    """The biases make the model think one letter and stop; what follows is the grammar's."""
    biases = {"logit_bias": {"66": 30.0, str(THINK_CLOSE_ID): 29.0}, "presence_penalty": 2.0, "temperature": 0.0}
    found = engine.ask(url, stream=stream, thinking=True, ebnf=only("\n\nHi.\n\n" + BLOCK), **biases)
    assert found["calls"] == [OSLO]
    assert (str(found["content"]).strip(), found["finish"]) == ("Hi.", "tool_calls")
    assert found["reasoning"]
    assert "think" not in f"{found['content']}{found['reasoning']}"
