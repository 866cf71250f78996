"""From files to engines and models: every kind of input, rubbish, and secrets."""

import contextlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.diagnose.audit.model import Deployment, ModelFolder
from closeranks.diagnose.audit.rule import RULES
from closeranks.diagnose.audit.sources import (
    SourceError,
    collect,
    dockerfile,
    flags,
    hosts,
    modelfolder,
    plainyaml,
    units,
)
from closeranks.diagnose.audit.sources.collect import _merge

SECRET = "sk-planted-7f3a91"


def test_flags_in_every_spelling() -> None:
    line = "A=1 python -m sglang.launch_server --tp 4 --enable_metrics --model=m --page-size 16 --x -1 --page-size 64"
    engine = flags.parse(flags.split_line(line), "e")
    assert engine.kind == "sglang"
    assert engine.env == {"A": "1"}
    assert engine.flags == {"tp-size": "4", "enable-metrics": "true", "model-path": "m", "page-size": "64", "x": "-1"}
    assert engine.flag("disaggregation-transfer-backend") == "mooncake"
    assert engine.role == ""


def test_vllm_serve_names_its_model_and_role() -> None:
    config = """'{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'"""
    line = f"vllm serve Qwen/Qwen3-8B -tp 2 --kv-transfer-config {config}"
    engine = flags.parse(flags.split_line(line), "e")
    assert (engine.kind, engine.flag("model-path"), engine.tp, engine.role) == ("vllm", "Qwen/Qwen3-8B", 2, "decode")
    broken = flags.parse(["vllm", "serve", "m", "--kv-transfer-config", "{oops"], "e")
    assert broken.role == ""


UNIT = f"""
[Unit]
Description=prefill
[Service]
Environment="SGLANG_REQ_WAITING_TIMEOUT=10" HF_TOKEN={SECRET}
ExecStart=/usr/bin/env python3 -m sglang.launch_server \\
    --model-path /m --tp-size 4 \\
    --disaggregation-mode prefill --api-key {SECRET}
Restart=always
# KillMode=process
"""


def test_a_unit_file(tmp_path: Path) -> None:
    (tmp_path / "prefill.service").write_text(UNIT)
    [engine] = collect([str(tmp_path)]).engines
    assert (engine.role, engine.tp) == ("prefill", 4)
    assert engine.env["SGLANG_REQ_WAITING_TIMEOUT"] == "10"
    assert engine.complete_env
    assert engine.unit is not None
    assert engine.unit["restart"] == ("always",)
    assert "killmode" not in engine.unit
    assert SECRET not in repr(engine)


COMPOSE = f"""
services:
  decode:
    image: lmsysorg/sglang:v0.5.14-cu126
    command: ["python3", "-m", "sglang.launch_server", "--tp", "2", "--disaggregation-mode", "decode"]
    environment: {{SYNC_TOKEN_IDS_ACROSS_TP: 1, API_KEY: {SECRET}}}
    cap_add: [SYS_PTRACE]
  redis: {{image: redis}}
"""
KUBERNETES = f"""
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.20.1
          command: [/bin/sh, -c, "vllm serve m --tensor-parallel-size 8 --api-key {SECRET}"]
          env: [{{name: VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, value: "3600"}}]
          securityContext: {{capabilities: {{add: [SYS_PTRACE]}}}}
---
kind: Service
"""


def test_containers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(COMPOSE)
    (tmp_path / "b.yml").write_text(KUBERNETES)
    one, two = collect([str(tmp_path)]).engines
    assert (one.kind, one.version, one.role, one.tp) == ("sglang", "0.5.14", "decode", 2)
    assert one.container is not None
    assert one.container["cap_add"] == "SYS_PTRACE"
    assert (two.kind, two.version, two.tp) == ("vllm", "0.20.1", 8)
    assert two.env == {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600"}
    assert SECRET not in repr((one, two))


SERVER_INFO = {
    "model_path": "/m",
    "tp_size": 4,
    "version": "0.5.13.post1",
    "disaggregation_mode": "decode",
    "enable_metrics": True,
    "disable_overlap_schedule": False,
    "chat_template": None,
    "api_key": SECRET,
    "internal_states": [{"x": 1}],
}


def test_server_info(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text(json.dumps(SERVER_INFO))
    [engine] = collect([str(tmp_path / "info.json")]).engines
    assert (engine.kind, engine.version, engine.role, engine.tp) == ("sglang", "0.5.13.post1", "decode", 4)
    assert engine.on("enable-metrics")
    assert "disable-overlap-schedule" not in engine.flags
    assert SECRET not in repr(engine)


def test_a_log_with_server_arguments(tmp_path: Path) -> None:
    line = (
        "[2026-06-09 21:00:00] server_args=ServerArgs(model_path='/m', tp_size=2, disaggregation_mode='prefill', "
        f"api_key='{SECRET}', chat_template=None, enable_metrics=True, cuda_graph_bs=[1, 2, 4], page_size=64)\n"
    )
    (tmp_path / "prefill.log").write_text("noise\n" + line + line + "[2026-06-09 21:00:01] ready\n")
    [engine] = collect([str(tmp_path / "prefill.log")]).engines
    assert (engine.role, engine.tp, engine.flag("page-size")) == ("prefill", 2, "64")
    assert SECRET not in repr(engine)


def test_a_log_with_server_arguments_as_a_dictionary() -> None:
    log = (
        "launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported, but 'sglang serve' is "
        "the recommended entrypoint.\n  Example: sglang serve --model-path <model> [options]\n"
        "[2026-11-30 12:00:00] server_args={'model_path': '/m', 'tp_size': 4, 'disaggregation_mode': 'decode'}\n"
        "[2026-11-30 13:02:51] server_args={'model_path': '/m', 'tp_size': 2, 'disaggregation_mode': 'decode', "
        f"'api_key': '{SECRET}', 'watermark_key': '<redacted>', 'chat_template': None, 'enable_metrics': True, "
        "'cuda_graph_bs': [1, 2, 4], 'page_size': 64, 'is_embedding': False}\n"
    )
    [engine] = units.from_text(log, "decode.log")
    assert (engine.kind, engine.role, engine.tp, engine.flag("page-size")) == ("sglang", "decode", 2, "64")
    assert engine.on("enable-metrics")
    assert not {"chat-template", "is-embedding"} & set(engine.flags)
    assert [name for name, value in engine.flags.items() if value == flags.HIDDEN] == ["api-key"]
    assert SECRET not in repr(engine)


def test_a_vllm_log() -> None:
    log = (
        "(APIServer pid=7) INFO 08-09 03:02:26 [api_server.py:1777] vLLM API server version 0.20.1\n"
        "(APIServer pid=7) INFO 08-09 03:02:26 [utils.py:326] non-default args: {'model_tag': 'm', 'api_key': "
        f"'{SECRET}', 'enable_auto_tool_choice': True, 'tensor_parallel_size': 4, 'kv_transfer_config': "
        "KVTransferConfig(kv_connector='NixlConnector', engine_id='x', kv_role='kv_producer')}\n"
    )
    [engine] = units.from_text(log, "vllm.log")
    assert (engine.kind, engine.version, engine.tp, engine.role) == ("vllm", "0.20.1", 4, "prefill")
    assert engine.flag("model-path") == "m"
    assert engine.on("enable-auto-tool-choice")
    assert SECRET not in repr(engine)


def test_the_banner_of_a_vllm_log_tells_its_version() -> None:
    log = (
        "(APIServer pid=7) INFO 11-30 05:48:31 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0\n"
        "(APIServer pid=7) INFO 11-30 05:48:31 [api_utils.py:347]   █▄█▀ █     █     █     █  model   m\n"
        "(APIServer pid=7) INFO 11-30 05:48:31 [api_utils.py:286] non-default args: {'model_tag': 'm'}\n"
    )
    [engine] = units.from_text(log, "vllm.log")
    assert (engine.kind, engine.version) == ("vllm", "0.32.0")


def test_a_shell_file_and_bare_flags(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "#!/bin/bash\nexport SGLANG_REQ_WAITING_TIMEOUT=10\n"
        "python -m sglang.launch_server \\\n  --tp 2 --model-path m\n"
    )
    (tmp_path / "zflags.txt").write_text("--disaggregation-mode decode --tp-size 8\n")
    one, two = collect([str(tmp_path)]).engines
    assert (one.tp, one.env) == (2, {"SGLANG_REQ_WAITING_TIMEOUT": "10"})
    assert (two.kind, two.tp) == ("sglang", 8)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("--tp 8 --nnodes 2 --attention-backend fa3", "sglang"),
        ("--max-num-seqs=4 --kv-transfer mooncake", "vllm"),
        ("--port 8000", ""),
        ("--tp 8 --max-num-seqs 4", ""),
    ],
)
def test_bare_flags_tell_their_engine(line: str, kind: str) -> None:
    [engine] = units.from_text(line, "flags.txt")
    assert engine.kind == kind


def write_model(folder: Path, model_type: str = "deepseek_v4", special: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 129280, "eos_token_id": 1}))
    tokens = [
        {"id": 1, "content": "<end>", "special": True},
        {"id": 128825, "content": "｜DSML｜", "special": special},
        {"id": 128821, "content": "<think>", "special": False},
        {"id": 128822, "content": "</think>", "special": False},
    ]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}, "chat_template": "a"}))
    (folder / "chat_template.jinja").write_text("<｜DSML｜function_calls>")
    return folder


def test_a_model_folder_and_the_engine_that_names_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    deployment = collect([], ["sglang==0.5.23", "--model-path", str(folder)])
    [model] = deployment.models
    assert (model.model_type, model.vocab_size, model.eos_ids, model.eos_tokens) == (
        "deepseek_v4",
        129280,
        (1,),
        ("<end>",),
    )
    assert model.added["｜DSML｜"] is False
    assert set(model.templates) == {"tokenizer_config.json", "chat_template.jinja"}


def test_a_broken_model_folder_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("[1")
    with pytest.raises(SourceError, match=r"m: tokenizer\.json is no JSON"):
        collect([str(folder)])
    (folder / "tokenizer.json").write_text("[1]")
    with pytest.raises(SourceError, match="holds a list"):
        collect([str(folder)])


KEYS = [
    "model_type",
    "added_tokens",
    "content",
    "id",
    "special",
    "chat_template",
    "eos_token",
    "eos_token_id",
    "vocab_size",
    "architectures",
    "added_tokens_decoder",
    "text_config",
    "name",
    "template",
    "services",
    "containers",
    "command",
    "args",
    "env",
    "environment",
    "image",
    "cap_add",
    "securityContext",
    "capabilities",
    "add",
    "privileged",
    "restart",
    "model_path",
    "tp_size",
    "version",
    "vllm_config",
    "server_args",
    "value",
]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("python -m sglang.launch_server --tp 2")
)
ANY_JSON = st.recursive(
    LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(KEYS), x, max_size=4), max_leaves=12
)


@settings(max_examples=60, deadline=None)
@given(data=ANY_JSON)
def test_model_folders_of_any_json(tmp_path_factory: pytest.TempPathFactory, data: object) -> None:
    folder = tmp_path_factory.mktemp("m")
    whole = data if isinstance(data, dict) else dict.fromkeys(KEYS, data)
    for name in modelfolder.FILES:
        (folder / name).write_text(json.dumps(whole))
    assert isinstance(modelfolder.read(folder), ModelFolder)


@settings(max_examples=100, deadline=None)
@given(data=ANY_JSON)
def test_structures_of_any_shape(data: object) -> None:
    units.from_yaml(json.dumps(data), "x.yaml")
    units.from_yaml(json.dumps({"services": {"a": data}}), "x.yaml")
    units.from_yaml(json.dumps({"spec": {"containers": [data]}}), "x.yaml")
    if isinstance(data, dict):
        flags.from_json(data, "x.json")


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=400))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    for reader in (units.from_text, units.from_unit, units.from_yaml, dockerfile.engines):
        with contextlib.suppress(plainyaml.Refused):
            reader(text, "x")


@given(
    words=st.lists(
        st.sampled_from(
            ["--tp", "2", "--a=b", "-tp", "serve", "vllm", "sglang==x", "K=V", "--", "-1", "", "=", "--=", "'"]
        )
    )
)
def test_any_words_are_an_engine(words: list[str]) -> None:
    engine = flags.parse(words, "x")
    assert engine.tp >= 1
    assert isinstance(engine.role, str)


@given(
    name=st.sampled_from(["api-key", "hf_token", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "admin-api-key", "password"]),
    style=st.sampled_from(
        ["--{n} {v}", "--{n}={v}", "{n}={v}", "--model-path s3://u:{v}@host/m", "X=http://{v}@proxy"]
    ),
)
def test_no_secret_gets_in(name: str, style: str) -> None:
    words = ["sglang==1", *style.format(n=name, v=SECRET).split(" ")]
    assert SECRET not in repr(flags.parse(words, "x"))


class _Handler(http.server.BaseHTTPRequestHandler):
    answers: dict[str, object]

    def do_GET(self) -> None:
        body = json.dumps(self.answers.get(self.path)).encode()
        self.send_response(200 if self.path in self.answers else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Handler]]]:
    handler = type("Handler", (_Handler,), {"answers": {}})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", handler
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_an_engine_by_its_url(server: tuple[str, type[_Handler]]) -> None:
    url, handler = server
    handler.answers = {"/get_server_info": SERVER_INFO}
    [engine] = collect([url]).engines
    assert (engine.kind, engine.version, engine.label) == ("sglang", "0.5.13.post1", url)
    for owner, kind in (("vllm", "vllm"), ("closeranks", "closeranks"), ("somebody", "")):
        models = {"object": "list", "data": [{"id": "m", "owned_by": owner}]}
        handler.answers = {"/version": {"version": "0.32.0"}, "/v1/models": models}
        [engine] = collect([url]).engines
        assert (engine.kind, engine.version) == (kind, "0.32.0")
    handler.answers = {}
    with pytest.raises(SourceError, match="no engine answers there"):
        collect([url])


def test_binaries_beside_settings_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\0\1python -m sglang.launch_server --tp 2\n" * 10)
    (tmp_path / "run.sh").write_text("python -m sglang.launch_server --tp 4\n")
    [engine] = collect([str(tmp_path)]).engines
    assert engine.tp == 4


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        collect([str(tmp_path / "nothing")])
    with pytest.raises(SourceError, match="no engine answers") as caught:
        collect([f"http://user:{SECRET}@127.0.0.1:1"])
    assert SECRET not in str(caught.value)


def test_two_engines_of_one_file_have_two_names(tmp_path: Path) -> None:
    (tmp_path / "f.sh").write_text("sglang==1 --disaggregation-mode prefill\nsglang==1 --disaggregation-mode decode\n")
    assert [engine.label for engine in collect([str(tmp_path)]).engines] == ["f.sh (prefill)", "f.sh (decode)"]


def test_the_host(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("1\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tx\nCapEff:\t0000000000080000\n")
    host = hosts.this_host(tmp_path, search=str(tmp_path))
    assert (host.ptrace_scope, host.cap_sys_ptrace, host.pyspy) == (1, True, "")
    assert hosts.this_host().pyspy


def test_one_engine_in_three_sources_is_one(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text(json.dumps(SERVER_INFO))
    (tmp_path / "flags.txt").write_text(
        "python3 -m sglang.launch_server --model-path /m --tp 4 --disaggregation-mode decode"
    )
    (tmp_path / "other.txt").write_text(
        "python3 -m sglang.launch_server --model-path /m --tp 8 --disaggregation-mode decode"
    )
    one, other = collect([str(tmp_path)]).engines
    assert (one.label, one.version, one.tp) == ("flags.txt + info.json", "0.5.13.post1", 4)
    assert (other.label, other.tp) == ("other.txt", 8)


def test_two_units_with_equal_flags_are_two_engines(tmp_path: Path) -> None:
    for name in ("a.service", "b.service"):
        (tmp_path / name).write_text(UNIT)
    assert len(collect([str(tmp_path)]).engines) == 2


def test_a_folder_is_read_with_its_subfolders(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / "site" / role).mkdir(parents=True)
        words = f"python -m sglang.launch_server --model-path m --disaggregation-mode {role} --tp-size 2"
        (tmp_path / "site" / role / "start.sh").write_text(f"#!/bin/sh\n{words}\n")
    (tmp_path / "site" / "loop").symlink_to(tmp_path)
    (tmp_path / "site" / ".git").mkdir()
    (tmp_path / "site" / ".git" / "old.sh").write_text("python -m sglang.launch_server --model-path old\n")
    write_model(tmp_path / "site" / "m")
    found = collect([str(tmp_path)])
    assert [(e.label, e.role) for e in found.engines] == [
        ("site/decode/start.sh", "decode"),
        ("site/prefill/start.sh", "prefill"),
    ]
    assert [model.path for model in found.models] == [str(tmp_path / "site" / "m")]


def test_a_folder_that_is_no_deployment_is_refused(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*("d" * 9))
    deep.mkdir(parents=True)
    with pytest.raises(SourceError, match="8 folders deep: give the folder of the deployment's own files"):
        collect([str(tmp_path)])
    for number in range(2001):
        (deep / f"{number}.txt").touch()
    with pytest.raises(SourceError, match="more than 2000 files"):
        collect([str(deep)])


def test_a_line_that_is_commented_out_starts_nothing() -> None:
    text = (
        "#!/bin/bash\n# python3 -m sglang.launch_server --tp 8 \\\n"
        "exec python3 -m sglang.launch_server --tp 4 \\\n  # --watchdog-timeout 3600 \\\n  --page-size 64 # --dp 2\n"
    )
    [engine] = units.from_text(text, "run.sh")
    assert engine.flags == {"tp-size": "4", "page-size": "64"}
    assert engine.line == 3


def test_a_unit_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    (tmp_path / "x.service").write_text(
        "[Service]\nEnvironment=A=1\nExecStart=/usr/bin/python3 -m sglang.launch_server --tp 4 --dp 3600\n"
        "ExecStart=\nEnvironment=\nEnvironment=B=2\nKillMode=process\n"
        "ExecStart=/usr/bin/python3 -m sglang.launch_server \\\n# --page-size 1 \\\n; --page-size 2 \\\n --tp 2\n"
    )
    [engine] = collect([str(tmp_path)]).engines
    assert (dict(engine.flags), dict(engine.env), engine.line) == ({"tp-size": "2"}, {"B": "2"}, 8)
    (tmp_path / "x.service.d").mkdir()
    (tmp_path / "x.service.d" / "over.conf").write_text(
        "[Service]\nExecStart=\nExecStart=/usr/bin/python3 -m sglang.launch_server --tp 8\nKillMode=\n"
    )
    for source in (tmp_path, tmp_path / "x.service"):
        [engine] = collect([str(source)]).engines
        assert engine.tp == 8
        assert "killmode" not in (engine.unit or {})


@pytest.mark.parametrize(
    "command",
    [
        'command: [bash, -lc]\n    args: ["ulimit -l 9 && python3 -m sglang.launch_server --tp 4 2>&1 | tee x"]',
        'command: ["/bin/sh", "-ec", "cd /x; exec python3 -m sglang.launch_server --tp 4 > log"]',
        'entrypoint: [tini, --, bash, -c]\n    command: ["FOO=1 python3 -m sglang.launch_server --tp 4"]',
        "command:\n    - sh\n    - -c\n    - |\n      set -e\n      # --tp 8\n"
        "      python3 -m sglang.launch_server \\\n        --tp 4",
        "command: python3 -m sglang.launch_server --tp 4",
    ],
)
def test_a_script_of_a_container(command: str) -> None:
    [engine] = units.from_yaml(f"services:\n  s:\n    image: lmsysorg/sglang:v0.5.12\n    {command}\n", "x.yaml")
    assert (engine.kind, engine.version, dict(engine.flags), engine.line) == ("sglang", "0.5.12", {"tp-size": "4"}, 3)


DOCKERFILE = """
# builds on another
ARG TAG=v0.5.12-cu126
FROM lmsysorg/sglang:${TAG} AS base
ENV SGLANG_REQ_WAITING_TIMEOUT=10 A="b c"
FROM base
CMD ["python3", "-m", "sglang.launch_server", "--tp", "4"]
"""


def test_a_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    [engine] = collect([str(tmp_path)]).engines
    assert (engine.kind, engine.version, engine.tp, engine.line) == ("sglang", "0.5.12", 4, 7)
    assert engine.env == {"SGLANG_REQ_WAITING_TIMEOUT": "10", "A": "b c"}
    shell = (
        "FROM ubuntu\nRUN pip install 'sglang[all]==0.5.14'\nCMD cd /x && exec python3 -m sglang.launch_server --tp 2\n"
    )
    [engine] = dockerfile.engines(shell, "Dockerfile.gpu")
    assert (engine.version, engine.tp) == ("0.5.14", 2)
    flags_only = (
        'FROM vllm/vllm-openai:v0.20.1\nENTRYPOINT ["vllm", "serve"]\nCMD ["m", "--tensor-parallel-size", "2"]\n'
    )
    [engine] = dockerfile.engines(flags_only, "Dockerfile")
    assert (engine.kind, engine.version, engine.tp) == ("vllm", "0.20.1", 2)
    assert dockerfile.engines("FROM ubuntu\nCMD true\n", "Dockerfile") == []


LAUGHS = "a0: &a0 {containers: []}\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(11)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &x [*x]", "holds itself"),
        ("a: &x {b: *x}", "holds itself"),
        (LAUGHS, "unfolds to at most"),
        ("[" * 20_000, "nested at most"),
        ("- " * 3000 + "a", "nested at most"),
        ("a: 1\n" * 300_000, "more than 1 MiB"),
        ("a: [", "can be read (line 1)"),
        ("a: *b", "alias"),
    ],
)
def test_yaml_has_bounds(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(plainyaml.Refused, match=why.replace("(", r"\(").replace(")", r"\)")):
        plainyaml.load(text)
    (tmp_path / "bad.yaml").write_text(text)
    (tmp_path / "good.yaml").write_text(COMPOSE)
    found = collect([str(tmp_path)])
    assert len(found.engines) == 1
    assert [one.label for one in found.unread] == ["bad.yaml"]


def test_scalars_of_yaml_are_what_was_written() -> None:
    text = "a: 1.10\nb: no\nc: 2020-13-45\nd: !Ref x\ne: !!python/object:os.system x\nf: !!int zz\n"
    text += "g: &g {x: 1}\nh: {<<: *g}"
    [found] = plainyaml.load(text)
    assert [found[k] for k in "abcdef"] == ["1.10", "no", "2020-13-45", "x", "x", "zz"]
    assert found["h"] == {"x": "1", plainyaml.LINE: 8}
    assert plainyaml.load(json.dumps({"a": "\U0001f600"}))[0]["a"]


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab:-[]{}&*<>!|#'\"\n 0.,?%@\t", max_size=60))
def test_any_yaml_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(plainyaml.Refused):
        plainyaml.load(text)


def test_names_of_any_bytes(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"x\xff.sh")).write_text("python -m sglang.launch_server --tp 2\n")
    [engine] = collect([str(tmp_path)]).engines
    assert engine.label == "x\\xff.sh"


def test_what_holds_one_up_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "run.sh").write_text("python -m sglang.launch_server --tp 2\n")
    assert len(collect([str(tmp_path)]).engines) == 1
    with pytest.raises(SourceError, match="device"):
        collect(["/dev/zero"])
    with pytest.raises(SourceError, match="empty path"):
        collect([""])


@pytest.mark.parametrize("address", ["http://:{}@127.0.0.1:1", "http://u:{}/x@127.0.0.1:1", "http://[{}"])
def test_no_password_of_an_address_is_said(address: str) -> None:
    with pytest.raises(SourceError) as caught:
        collect([address.format(SECRET)])
    assert SECRET not in str(caught.value)


SERVER = "python3 -m sglang.launch_server --model-path /m --tp 2"


@pytest.mark.parametrize(
    "line",
    [
        "root 4399 0.0 0.0 9000 900 ? S 12:01 0:00 grep sglang.launch_server",
        "root 4399 0.0 0.0 9000 900 ? S 12:01 0:00 tail -f /var/log/sglang.launch_server.log",
        'root 4403 0.0 0.0 9000 900 ? S 12:01 0:00 watch -n1 ps aux | grep -e "vllm serve"',
        "root 4402 0.0 0.0 9000 900 ? S 12:01 0:00 python3 -m sglang.bench_serving --backend sglang --port 30000",
        "root 4390 0.0 0.0 9000 900 ? S 12:01 0:00 python3 -m sglang_router.launch_router --worker-urls http://a:1",
        "pkill -f 'vllm serve --tp 2'",
        f'echo "starting: {SERVER}"',
    ],
)
def test_lines_that_speak_of_an_engine_start_none(line: str) -> None:
    assert units.from_text(line, "ps.txt") == []


@pytest.mark.parametrize(
    "service",
    [
        "image: lmsysorg/sglang-router:0.2.1\n    command: [--pd-disaggregation, --port, '8000']",
        "image: python:3.12\n    command: [python, -m, sglang.bench_serving, --backend, sglang, --port, '30000']",
        "image: lmsysorg/sglang:v0.5.23\n    command: [python3, -m, sglang_router.launch_router, --port, '8000']",
        "image: vllm/vllm-openai:v0.27.1\n    entrypoint: [vllm, bench, serve, --model, m]",
    ],
)
def test_routers_and_benchmarks_of_a_compose_file_are_no_engines(service: str) -> None:
    assert units.from_yaml(f"services:\n  x:\n    {service}\n", "compose.yaml") == []


def test_an_array_of_a_shell_file_holds_the_flags_of_the_command_that_uses_it() -> None:
    text = (
        f"MODEL=/models/DeepSeek-R1\nAPI_KEY={SECRET}\n"
        "ARGS=(\n  --model-path $MODEL\n  # --tp 8\n  --tp 16 # two hosts\n"
        ')\nARGS+=(--page-size 64)\nEXTRA="--dp 2 --enable-metrics"\n'
        'nohup python3 -m sglang.launch_server "${ARGS[@]}" $EXTRA --x $API_KEY > log 2>&1 &\n'
    )
    [engine] = units.from_text(text, "run.sh")
    assert engine.flags == {
        **{"model-path": "/models/DeepSeek-R1", "tp-size": "16", "page-size": "64"},
        **{"dp-size": "2", "enable-metrics": "true", "x": "$API_KEY"},
    }
    assert engine.line == 10


@pytest.mark.parametrize(
    ("line", "kind", "version", "env"),
    [
        (
            f"docker run -d --gpus all -e HF_TOKEN={SECRET} -e A=1 -p 1:1 vllm/vllm-openai:v0.27.1 --model m --port 1",
            *("vllm", "0.27.1", {"HF_TOKEN": flags.HIDDEN, "A": "1"}),
        ),
        (f"podman run --rm -it lmsysorg/sglang:v0.5.10-cu126 {SERVER} --port 1", "sglang", "0.5.10", {}),
        (
            f"srun --container-image=lmsysorg/sglang:v0.5.10 bash -c 'A=1 {SERVER} --port 1'",
            "sglang",
            "0.5.10",
            {"A": "1"},
        ),
        (f"ssh gpu-1 '{SERVER} --port 1'", "sglang", None, {}),
        ("python3 -m dynamo.vllm --model m --port 1 --is-prefill-worker", "vllm", None, {}),
    ],
)
def test_an_engine_in_a_container_or_on_another_host(line: str, kind: str, version: str | None, env: object) -> None:
    [engine] = units.from_text(line, "run.sh")
    assert (engine.kind, engine.version, engine.env, engine.flag("port")) == (kind, version, env, "1")
    assert SECRET not in repr(engine)
    assert "gpus" not in engine.flags


def test_commands_of_one_line_are_told_apart() -> None:
    [engine] = units.from_text(f"echo start;A=';' {SERVER} --port 1;tail -f log", "run.sh")
    assert (engine.env, engine.flag("port")) == ({"A": ";"}, "1")


def test_images_that_start_no_engine_by_themselves() -> None:
    assert units.from_text("docker run -d lmsysorg/sglang-router:0.2.1 --port 1", "run.sh") == []
    assert units.from_text("docker run -d --name vllm redis:7 --port 1", "run.sh") == []
    [engine] = units.from_text(f"docker run nvcr.io/nvidia/ai-dynamo/sglang-runtime:1.2.1 {SERVER}", "run.sh")
    assert engine.version is None  # that is Dynamo's


def test_supervisord(tmp_path: Path) -> None:
    text = (
        f"[supervisord]\nnodaemon=true\n[program:decode]\ncommand=/opt/venv/bin/{SERVER}\n    --port 1\n"
        f'environment=A="1",HF_TOKEN="{SECRET}"\n; environment=B=2\n[program:nginx]\ncommand=nginx\n'
    )
    (tmp_path / "supervisord.conf").write_text(text)
    [engine] = collect([str(tmp_path)]).engines
    assert engine.env == {"A": "1", "HF_TOKEN": flags.HIDDEN}
    assert (engine.flag("port"), engine.line, engine.complete_env) == ("1", 3, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{SERVER} --port 1 &\n{SERVER} --port 1 --disaggregation-mode decode &\nwait\n", 1),
        (f"{SERVER} --port 1 &\n{SERVER} --port 2 &\n", 0),
        (f"{SERVER} --port 1 --host 10.0.0.1 &\n{SERVER} --port 1 --host 10.0.0.2 &\n", 0),
        (f"ssh a {SERVER} --port 1 &\nssh b {SERVER} --port 1 &\n", 0),
        (f"if [ $R = p ]; then\n{SERVER} --port 1 &\nelse\n{SERVER} --port 1 --dp 2 &\nfi\n", 0),
        (f"{SERVER} --port 1\n{SERVER} --port 1 --dp 2\n", 0),
        (f"root 1 0 0 9 9 ? S 1 1 {SERVER} --port 1\nroot 2 0 0 9 9 ? S 1 1 {SERVER} --port 1 --dp 2\n", 0),
    ],
    ids=[
        "side by side",
        "other ports",
        "other addresses",
        "other hosts",
        "either",
        "one after the other",
        "containers",
    ],
)
def test_ports_of_one_script(text: str, found: int) -> None:
    hits = list(RULES["port-taken-twice"].check(Deployment(_merge(units.from_text(text, "run.sh")))))
    assert len(hits) == found
