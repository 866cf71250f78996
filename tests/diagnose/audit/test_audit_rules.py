"""Every rule written in Python: what it finds, and the nearest thing that it must not find."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.diagnose.audit import Deployment, Engine, audit
from closeranks.diagnose.audit.judge import all_rules
from closeranks.diagnose.audit.model import ChangedFile, Host, Install, Library, ModelFolder
from closeranks.diagnose.audit.rule import RULES, Hit, Open
from closeranks.diagnose.audit.rules.units import seconds
from closeranks.diagnose.audit.sources import flags, units

V4 = ModelFolder(
    "v4",
    "deepseek_v4",
    added={"｜DSML｜": False, "<think>": False, "</think>": False},
    vocab_size=129280,
    has_tokenizer=True,
)
QWEN = ModelFolder(
    "qwen",
    "qwen3",
    added={"<tool_call>": False, "</tool_call>": False},
    templates={"chat_template.jinja": "{{ tools }}"},
)
CODER = replace(QWEN, path="Qwen3-Coder-30B")
V32_EXP = ModelFolder(
    "DeepSeek-V3.2-Exp", "deepseek_v32", templates={"tokenizer_config.json": "{% if tools %}<｜tool▁calls▁begin｜>"}
)
PLAIN = ModelFolder("x", "llama", has_tokenizer=True)
V32_TEMPLATE = "{% if tools %}<｜DSML｜function_calls>{% endif %}"


def shown(model: ModelFolder, text: str) -> tuple[ModelFolder, ...]:
    return (replace(model, templates={"chat_template.jinja": text}),)


def engines(*lines: str) -> tuple[Engine, ...]:
    return tuple(flags.parse(flags.split_line(line), f"e{n}") for n, line in enumerate(lines))


def of(*lines: str, models: tuple[ModelFolder, ...] = (), **rest: object) -> Deployment:
    return Deployment(engines(*lines), models, **rest)  # type: ignore[arg-type]


def named(**lines: str) -> Deployment:
    """Engines by their labels; `__` stands for a slash."""
    found = [flags.parse(flags.split_line(line), label.replace("__", "/")) for label, line in lines.items()]
    return Deployment(tuple(found))


def unit(*directives: str) -> Deployment:
    text = "[Service]\nExecStart=/usr/bin/python3 -m sglang.launch_server --tp 2\n" + "\n".join(directives)
    return Deployment(tuple(units.from_unit(text, "a.service")))


def container(extra: str = "", restart: str = "always") -> Deployment:
    start = "    command: python3 -m sglang.launch_server --tp 2\n"
    text = f"services:\n  p:\n    image: lmsysorg/sglang:v0.5.23\n{start}    restart: '{restart}'\n{extra}"
    return Deployment(tuple(units.from_yaml(text, "compose.yaml")))


P, D = "sglang==0.5.23 --disaggregation-mode prefill --port 1", "sglang==0.5.23 --disaggregation-mode decode --port 2"
PATCH = ChangedFile("sglang/srt/mem_cache/hicache.py", "modified", "HiCache")
Case = Callable[[], Deployment]

CASES: dict[str, tuple[list[Case], list[Case]]] = {
    "tool-parser-of-other-model": (
        [
            lambda: of("sglang==1 --tool-call-parser deepseekv32", models=(V4,)),
            lambda: of("vllm==1 --tool-call-parser hermes", models=(V4,)),
            lambda: of("sglang==1 --tool-call-parser deepseekv32 --model-path deepseek-ai/DeepSeek-V4-Flash"),
            lambda: of("sglang==1 --tool-call-parser deepseekv31 --model-path deepseek-ai/DeepSeek-V3.2"),
            lambda: of("sglang==1 --tool-call-parser deepseekv3 --model-path deepseek-ai/DeepSeek-V3.1"),
            lambda: of("vllm==1 --tool-call-parser deepseek_v31 --model deepseek-ai/DeepSeek-R1-0528"),
            lambda: of("vllm==1 --tool-call-parser hermes --model Qwen/Qwen3-Coder-30B-A3B-Instruct"),
            lambda: of("sglang==1 --tool-call-parser qwen25 --model-path /m/coder", models=(CODER,)),
        ],
        [
            lambda: of("sglang==1 --tool-call-parser deepseekv4", models=(V4,)),
            lambda: of("sglang==1 --tool-call-parser my_own", models=(V4,)),
            lambda: of("sglang==1 --tool-call-parser qwen25", models=(QWEN,)),
            lambda: of("vllm==1 --tool-call-parser deepseek_v32 --model deepseek-ai/DeepSeek-V3.2"),
            lambda: of("sglang==1 --tool-call-parser deepseekv31 --model-path deepseek-ai/DeepSeek-V3.2-Exp"),
            lambda: of("vllm==1 --tool-call-parser deepseek_v31 --model deepseek-ai/DeepSeek-V3.2-Exp"),
            lambda: of("sglang==1 --tool-call-parser deepseekv31 --model-path deepseek-ai/DeepSeek-V3.1-Terminus"),
            lambda: of("sglang==1 --tool-call-parser deepseekv3 --model-path deepseek-ai/DeepSeek-V3-0324"),
            lambda: of("sglang==1 --tool-call-parser deepseekv31 --model-path /models/our-deepseek-v3-tuned"),
            lambda: of("vllm==1 --tool-call-parser qwen3_xml --model Qwen/Qwen3-Coder-30B-A3B-Instruct"),
            lambda: of("vllm==1 --tool-call-parser hermes --model Qwen/Qwen3-32B"),
        ],
    ),
    "reasoning-parser-of-other-model": (
        [lambda: of("sglang==1 --reasoning-parser qwen3", models=(V4,))],
        [lambda: of("sglang==1 --reasoning-parser deepseek-v4", models=(V4,)), lambda: of("sglang==1", models=(V4,))],
    ),
    "parsers-of-two-models": (
        [lambda: of("sglang==1 --tool-call-parser deepseekv4 --reasoning-parser qwen3")],
        [lambda: of("sglang==1 --tool-call-parser deepseekv4 --reasoning-parser deepseek-v4")],
    ),
    "tool-parser-missing": (
        [lambda: of("sglang==1", models=(V4,))],
        [
            lambda: of("sglang==1 --tool-call-parser deepseekv4", models=(V4,)),
            lambda: of(P, models=(V4,)),
            lambda: of("sglang==1", models=(ModelFolder("s", "llama", templates={"chat_template.jinja": "hi"}),)),
            lambda: of("vllm==1 --task embed --model Qwen/Qwen3-8B"),
            lambda: of("vllm==1 --runner pooling --model Qwen/Qwen3-8B"),
            lambda: of("sglang==1 --is-embedding --model-path Qwen/Qwen3-8B"),
            lambda: of("vllm==1 --model Qwen/Qwen3-Reranker-4B"),
        ],
    ),
    "vllm-auto-tool-choice-off": (
        [lambda: of("vllm==1 --tool-call-parser hermes")],
        [
            lambda: of("vllm==1 --tool-call-parser hermes --enable-auto-tool-choice"),
            lambda: of("sglang==1 --tool-call-parser qwen"),
        ],
    ),
    "template-of-other-model": (
        [lambda: of(models=shown(V4, V32_TEMPLATE))],
        [
            lambda: of(models=shown(V4, "<｜DSML｜tool_calls>")),
            lambda: of(models=shown(replace(V4, model_type="deepseek_v32"), V32_TEMPLATE)),
            lambda: of(models=(V32_EXP,)),
        ],
    ),
    "template-against-parser": (
        [
            lambda: of(
                "sglang==1 --tool-call-parser deepseekv4",
                models=shown(ModelFolder("x"), V32_TEMPLATE),
            )
        ],
        [
            lambda: of(
                "sglang==1 --tool-call-parser deepseekv32",
                models=shown(ModelFolder("x"), V32_TEMPLATE),
            )
        ],
    ),
    "template-over-encoder": (
        [lambda: of("sglang==1 --chat-template my.jinja", models=(V4,))],
        [lambda: of("sglang==1", models=(V4,)), lambda: of("sglang==1 --chat-template my.jinja", models=(QWEN,))],
    ),
    "template-without-tools": (
        [lambda: of("sglang==1 --tool-call-parser qwen", models=shown(QWEN, "x"))],
        [
            lambda: of("sglang==1 --tool-call-parser qwen", models=(QWEN,)),
            lambda: of("sglang==1", models=shown(QWEN, "x")),
            lambda: of("sglang==1 --tool-call-parser deepseekv4", models=shown(V4, "x")),
        ],
    ),
    "template-missing": (
        [lambda: of("sglang==1", models=(PLAIN,))],
        [
            lambda: of("sglang==1", models=(V4,)),
            lambda: of("sglang==1 --chat-template a", models=(PLAIN,)),
        ],
    ),
    "marker-token-missing": (
        [lambda: of(models=(replace(V4, added={"<think>": False, "</think>": False}),))],
        [lambda: of(models=(V4,)), lambda: of(models=(ModelFolder("x", "deepseek_v4"),))],
    ),
    "marker-token-special": (
        [lambda: of(models=(replace(V4, added={**V4.added, "｜DSML｜": True}),))],
        [lambda: of(models=(replace(V4, added={**V4.added, "<｜end▁of▁sentence｜>": True}),))],
    ),
    "token-beyond-vocabulary": (
        [lambda: of(models=(replace(V4, ids={"<x>": 129280}),))],
        [
            lambda: of(models=(replace(V4, ids={"<x>": 129279}),)),
            lambda: of(models=(ModelFolder("x", ids={"<x>": 9}),)),
        ],
    ),
    "eos-not-an-end": (
        [lambda: of(models=(replace(V4, eos_tokens=("<e>",), ids={"<e>": 1}, eos_ids=(2,)),))],
        [
            lambda: of(models=(replace(V4, eos_tokens=("<e>",), ids={"<e>": 1}, eos_ids=(2, 1)),)),
            lambda: of(models=(V4,)),
        ],
    ),
    "two-templates": (
        [lambda: of(models=(replace(QWEN, templates={"chat_template.jinja": "a", "tokenizer_config.json": "b"}),))],
        [lambda: of(models=(replace(QWEN, templates={"chat_template.jinja": "a\n", "tokenizer_config.json": "a"}),))],
    ),
    "pair-other-version": (
        [lambda: of(P, D.replace("0.5.23", "0.5.22"))],
        [lambda: of(P, D), lambda: of(P, P.replace("0.5.23", "0.5.22"))],
    ),
    "pair-other-backend": (
        [lambda: of(P, D + " --disaggregation-transfer-backend nixl")],
        [lambda: of(P, D + " --disaggregation-transfer-backend mooncake")],
    ),
    "pair-other-model": (
        [
            lambda: of(P + " --model-path a", D + " --model-path b"),
            lambda: named(a__prefill=P + " --model a", a__decode=D + " --model b", b__prefill=P, b__decode=D),
            lambda: named(prefill=P + " --model a", decode_0=D + " --model a", decode_1=D + " --model b"),
        ],
        [
            lambda: of(P + " --model-path a", D + " --model a"),
            lambda: named(
                glm_prefill=P + " --model glm",
                glm_decode_0=D + " --model glm",
                kimi_prefill=P + " --model kimi",
                kimi_decode=D + " --model kimi",
            ),
            lambda: named(
                glm__prefill=P + " --model glm",
                kimi__prefill=P + " --model kimi",
                glm__decode=D + " --model glm",
                kimi__decode=D + " --model kimi",
            ),
            lambda: of(P + " --model a", P + " --model b", D + " --model a", D + " --model b"),
            lambda: of(P + " --model a", P + " --model b", D + " --model a", D + " --model c"),
        ],
    ),
    "pair-other-kv-layout": (
        [lambda: of(P + " --page-size 16", D + " --page-size 64"), lambda: of(P, D + " --kv-cache-dtype fp8_e5m2")],
        [lambda: of(P + " --page-size 16", D + " --page-size 16 --kv-cache-dtype auto")],
    ),
    "pair-other-speculation": ([lambda: of(P, D + " --speculative-algorithm EAGLE")], [lambda: of(P, D)]),
    "pair-other-parsers": (
        [lambda: of(P, D + " --tool-call-parser qwen")],
        [lambda: of(P + " --tool-call-parser qwen", D + " --tool-call-parser qwen")],
    ),
    "pair-other-context-length": ([lambda: of(P + " --context-length 8", D)], [lambda: of(P, D)]),
    "pair-unclear": (
        [lambda: of(P + " --model a", P + " --model b", D + " --model a", D + " --model c")],
        [
            lambda: of(P, D),
            lambda: of(P, P, D),
            lambda: named(prefill_0=P, prefill_1=P, decode_0=D, decode_1=D),
            lambda: of(P + " --model a", P + " --model b", D + " --model a", D + " --model b"),
        ],
    ),
    "pair-half": ([lambda: of(P), lambda: of(D, D)], [lambda: of(P, D), lambda: of("sglang==1 --tp 2")]),
    "port-taken-twice": (
        [
            lambda: of(P + " --host 127.0.0.1", D.replace("--port 2", "--port 1 --host 127.0.0.1")),
            lambda: of(P + " --host localhost", P.replace("--port 1", "--port 3 --host localhost")),
        ],
        [
            lambda: of(P, D),
            lambda: of(P, D.replace("--port 2", "--port 1")),
            lambda: of(P + " --host 127.0.0.1", D + " --host 127.0.0.1"),
        ],
    ),
    "unit-leaves-ranks": (
        [lambda: unit("KillMode=process")],
        [lambda: unit("KillMode=control-group"), lambda: unit("KillMode=mixed")],
    ),
    "unit-no-restart": (
        [lambda: unit(), lambda: unit("Restart=no"), lambda: container(restart="no")],
        [lambda: unit("Restart=always"), container, lambda: of(P)],
    ),
    "unit-slow-stop": (
        [lambda: unit("TimeoutStopSec=infinity"), lambda: unit("TimeoutStopSec=5min")],
        [lambda: unit("TimeoutStopSec=30"), lambda: unit()],
    ),
    "unit-restart-storm": (
        [lambda: unit("Restart=always", "StartLimitIntervalSec=0")],
        [lambda: unit("Restart=always"), lambda: unit("Restart=on-failure", "StartLimitIntervalSec=0")],
    ),
    "unit-no-ptrace": (
        [
            lambda: unit("SystemCallFilter=~@debug @mount"),
            lambda: unit("CapabilityBoundingSet=CAP_NET_BIND_SERVICE"),
            lambda: unit("CapabilityBoundingSet=~CAP_SYS_PTRACE"),
        ],
        [
            lambda: unit("SystemCallFilter=@system-service @debug", "CapabilityBoundingSet=CAP_SYS_PTRACE"),
            lambda: unit("CapabilityBoundingSet=~CAP_SYS_TIME"),
            unit,
        ],
    ),
    "container-no-ptrace": (
        [container],
        [lambda: container("    cap_add: [SYS_PTRACE]\n"), lambda: container("    privileged: true\n"), lambda: of(P)],
    ),
    "secret-on-command-line": (
        [lambda: of(P + " --api-key sk-1"), lambda: of(P + " --admin-api-key=sk-1")],
        [lambda: of(P + " --max-total-tokens 8")],
    ),
    "host-no-pyspy": ([lambda: of(host=Host())], [lambda: of(host=Host(pyspy="/bin/py-spy")), of]),
    "host-no-ptrace": (
        [lambda: of(host=Host(ptrace_scope=1)), lambda: of(host=Host(ptrace_scope=3, root=True))],
        [
            lambda: of(host=Host(ptrace_scope=1, root=True)),
            lambda: of(host=Host(ptrace_scope=0)),
            lambda: of(host=Host()),
        ],
    ),
    "install-patched": (
        [lambda: of(installs=(Install("sglang", "1", "/s", (PATCH,), 5),))],
        [lambda: of(installs=(Install("sglang", "1", "/s", (), 5),))],
    ),
    "install-ahead-of-tag": (
        [lambda: of(installs=(Install("sglang", "1", "/s", git_commit="abc", commits_ahead=3, tag="v1"),))],
        [lambda: of(installs=(Install("sglang", "1", "/s", git_commit="abc", commits_ahead=0, tag="v1"),))],
    ),
    "nccl-proxy-slots": (
        [lambda: of(libraries=(Library("nvidia-nccl-cu13", "2.28.9", "aarch64"),))],
        [
            lambda: of(libraries=(Library("nvidia-nccl-cu13", "2.29.3", "aarch64"),)),
            lambda: of(libraries=(Library("nvidia-nccl-cu12", "2.27.5", "x86_64"),)),
        ],
    ),
    "install-stand-in": ([lambda: of(unowned=("torchvision",))], [of]),
    "install-not-comparable": (
        [
            lambda: of(installs=(Install("vllm", "1", "/s", record_empty=True),)),
            lambda: of(installs=(Install("vllm", "1", "/s", problem="no"),)),
        ],
        [lambda: of(installs=(Install("vllm", "1", "/s"),))],
    ),
}


def hits(rule_id: str, deployment: Deployment) -> list[Hit]:
    return [result for result in RULES[rule_id].check(deployment) if isinstance(result, Hit)]


def test_every_rule_has_its_cases() -> None:
    all_rules()
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("rule_id", CASES)
def test_finds(rule_id: str) -> None:
    for number, make in enumerate(CASES[rule_id][0]):
        assert len(hits(rule_id, make())) == 1, f"case {number}"


@pytest.mark.parametrize("rule_id", CASES)
def test_does_not_find(rule_id: str) -> None:
    for number, make in enumerate(CASES[rule_id][1]):
        assert hits(rule_id, make()) == [], f"case {number}"


def test_rules_say_what_to_do() -> None:
    rules = all_rules()
    assert len({rule.id for rule in rules}) == len(rules) >= 60
    for rule in rules:
        assert len(rule.why) > 30, rule.id
        assert rule.fix.endswith((".", ")")), rule.id


def test_a_parser_without_a_model_is_an_open_question() -> None:
    results = list(RULES["tool-parser-of-other-model"].check(of("sglang==1 --tool-call-parser qwen --model-path /x")))
    assert [type(result) for result in results] == [Open]


def test_errors_come_first() -> None:
    report = audit(of(P.replace("0.5.23", "0.5.14") + " --disaggregation-transfer-backend nixl --tp 2", D))
    severities = [finding.severity for finding in report.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert severities[0] == "error"


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), ("5min 20s", 320), ("infinity", float("inf")), ("1h", 3600), ("x", None), ("", None)],
)
def test_time_spans(text: str, value: float | None) -> None:
    assert seconds(text) == value


def test_the_guide_lists_every_rule() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    for rule in all_rules():
        assert f"| `{rule.id}` | {rule.severity} | {rule.title} |" in guide
