"""Parser, reasoning parser and template against the model."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from closeranks.catalog.unsafe import families
from closeranks.diagnose.audit.model import Deployment, Engine, ModelFolder
from closeranks.diagnose.audit.rule import Hit, Open, rule


@cache
def _families() -> dict[str, dict[str, Any]]:
    return families()


def family_of_model(model: ModelFolder) -> str:
    """The family by model_type, or ``."""
    return next((name for name, f in _families().items() if model.model_type in f["model_types"]), "")


def _name(engine: Engine | None) -> str:
    return f"{engine.flag('model-path') or ''} {engine.flag('served-model-name') or ''}" if engine else ""


def belongings(model: ModelFolder, engine: Engine | None = None) -> dict[str, Any]:
    """What belongs to this model: its family's parsers and words, or those of the variant that its name tells."""
    family = _families().get(family_of_model(model), {})
    for name, own in (family.get("variants") or {}).items():
        if re.search(name, f"{model.path} {_name(engine)}".strip(), re.IGNORECASE):
            return {**family, **own}
    return family


def families_of_parser(kind: str, stage: str, parser: str) -> set[str]:
    """The families that this parser of this engine belongs to."""
    return {name for name, f in _families().items() if parser in (f.get(stage) or {}).get(kind, ())}


def families_of_template(text: str) -> set[str]:
    """The families whose words are in the template."""
    return {name for name, f in _families().items() if any(word in text for word in f.get("template", ()))}


def models_of(engine: Engine, deployment: Deployment) -> tuple[ModelFolder, ...]:
    """The model folders given; without any, what the name of the engine's model says of its family."""
    if deployment.models:
        return deployment.models
    name = _name(engine)
    for family in _families().values():
        if re.search(family["names"], name, re.IGNORECASE):
            return (ModelFolder(engine.flag("model-path") or name.strip(), family["model_types"][0]),)
    return ()


def pairs(deployment: Deployment) -> Iterator[tuple[Engine, ModelFolder]]:
    """Each engine with each model of a known family."""
    for engine in deployment.engines:
        for model in models_of(engine, deployment):
            if family_of_model(model):
                yield engine, model


_SCORES = re.compile(r"(?i)embed|rerank|reward|classif|[-_]prm\b")
_POOLING_TASKS = (
    "embed",
    "embedding",
    "score",
    "classify",
    "classification",
    "reward",
    "token_embed",
    "token_classify",
)


def answers_no_chat(engine: Engine) -> bool:
    """Whether an engine gives vectors or scores: nothing that it says is parsed."""
    pooling = engine.flag("runner") == "pooling" or engine.flag("task") in _POOLING_TASKS
    told = engine.flag("convert") in _POOLING_TASKS or engine.on("is-embedding")
    return pooling or told or bool(_SCORES.search(_name(engine)))


def _parser_of_other_model(deployment: Deployment, flag: str, stage: str) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        parser = engine.flag(flag)
        if not parser or parser == "auto":
            continue
        if not models_of(engine, deployment):
            yield Open(engine.label, f"the model's folder or config.json, to compare with --{flag} {parser}")
    for engine, model in pairs(deployment):
        parser = engine.flag(flag)
        allowed = (belongings(model, engine).get(stage) or {}).get(engine.kind, ())
        known = families_of_parser(engine.kind, stage, parser or "")
        if parser and allowed and known and parser not in allowed:
            if family_of_model(model) in known:  # of another variant of one family
                told = f"with {model.path}, which takes {' or '.join(allowed)}"
            else:
                told = f"is for {', '.join(sorted(known))}; the model is {model.model_type}"
            yield Hit(engine.label, f"--{flag} {parser} {told}")


@rule(
    "tool-parser-of-other-model",
    "error",
    "parser",
    "The tool-call parser belongs to another model",
    why="A parser that waits for another model's markers finds none: tool calls come out as assistant text.",
    fix="Use the parser of the model's own family, and its template with it.",
    refs=("sglang#39632",),
)
def tool_parser_of_other_model(deployment: Deployment) -> Iterable[Hit | Open]:
    return _parser_of_other_model(deployment, "tool-call-parser", "tool")


@rule(
    "reasoning-parser-of-other-model",
    "error",
    "parser",
    "The reasoning parser belongs to another model",
    why="Reasoning then ends up in the answer, or the answer in the reasoning, and tool calls in either.",
    fix="Use the reasoning parser of the model's own family.",
)
def reasoning_parser_of_other_model(deployment: Deployment) -> Iterable[Hit | Open]:
    return _parser_of_other_model(deployment, "reasoning-parser", "reasoning")


@rule(
    "parsers-of-two-models",
    "error",
    "parser",
    "Tool-call parser and reasoning parser belong to different models",
    why="Whichever model is served, one of the two is wrong for it.",
    fix="Use both parsers of the model's own family.",
)
def parsers_of_two_models(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        tool, reasoning = engine.flag("tool-call-parser") or "", engine.flag("reasoning-parser") or ""
        first = families_of_parser(engine.kind, "tool", tool)
        second = families_of_parser(engine.kind, "reasoning", reasoning)
        if first and second and not first & second:
            yield Hit(engine.label, f"--tool-call-parser {tool}, --reasoning-parser {reasoning}")


@rule(
    "tool-parser-missing",
    "warning",
    "parser",
    "A model that writes tool calls is served without a tool-call parser",
    why="Its tool-call markup reaches clients as assistant text.",
    fix="Set --tool-call-parser to the parser of the model's family.",
)
def tool_parser_missing(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine, model in pairs(deployment):
        own = belongings(model, engine)
        allowed = (own.get("tool") or {}).get(engine.kind, ())
        writes = own.get("tokens") or any("tools" in text for text in model.templates.values())
        if answers_no_chat(engine) or engine.role == "prefill" or engine.front:
            continue
        if allowed and writes and not engine.flag("tool-call-parser"):
            yield Hit(engine.label, f"{model.model_type}: expected --tool-call-parser {' or '.join(allowed)}")


@rule(
    "vllm-auto-tool-choice-off",
    "error",
    "parser",
    "vLLM has a tool-call parser and does not use it",
    why="Without --enable-auto-tool-choice vLLM refuses tool_choice=auto, and parses nothing for plain requests.",
    fix="Add --enable-auto-tool-choice.",
)
def vllm_auto_tool_choice_off(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        if engine.kind == "vllm" and engine.flag("tool-call-parser") and not engine.on("enable-auto-tool-choice"):
            yield Hit(engine.label, f"--tool-call-parser {engine.flag('tool-call-parser')} alone")


@rule(
    "template-of-other-model",
    "error",
    "template",
    "The chat template is another model's",
    why="The model is shown a tool format that it was not trained on (V3.2's function_calls on a V4 model) and answers "
    "in a mixture of both, which no parser takes whole.",
    fix="Remove the template, so that the engine's own encoder or the model's own template is used.",
    refs=("sglang#36154",),
)
def template_of_other_model(deployment: Deployment) -> Iterable[Hit | Open]:
    for model in deployment.models:
        family = family_of_model(model)
        for name, text in model.templates.items():
            found = families_of_template(text)
            own = any(word in text for word in belongings(model).get("template", ()))
            if family and found and family not in found and not own:
                yield Hit(
                    f"{model.path}/{name}", f"a template of {', '.join(sorted(found))}; the model is {model.model_type}"
                )


@rule(
    "template-against-parser",
    "error",
    "template",
    "Chat template and tool-call parser speak different formats",
    why="The template teaches the model one format in the prompt, and the parser looks for another in the answer.",
    fix="Use template and parser of the same family.",
)
def template_against_parser(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        parser = engine.flag("tool-call-parser") or ""
        wanted = families_of_parser(engine.kind, "tool", parser)
        for model in deployment.models:
            for name, text in model.templates.items():
                found = families_of_template(text)
                if wanted and found and not wanted & found:
                    yield Hit(
                        engine.label, f"{name}: a template of {', '.join(sorted(found))}; --tool-call-parser {parser}"
                    )


@rule(
    "template-over-encoder",
    "warning",
    "template",
    "A Jinja template replaces the engine's own encoder",
    why="For this family the engines carry the maker's encoder; a template beside it differs in tool results, in "
    "dropped reasoning and in what a user may spell.",
    fix="Remove --chat-template, or compare its output with the encoder's on the maker's test messages.",
)
def template_over_encoder(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine, model in pairs(deployment):
        if belongings(model, engine).get("encoder") and engine.flag("chat-template"):
            yield Hit(engine.label, f"--chat-template {engine.flag('chat-template')} with {model.model_type}")


@rule(
    "template-without-tools",
    "warning",
    "template",
    "The chat template has no place for tools",
    why="A tool-call parser is set, but the tools of a request never reach the prompt: the model cannot call them.",
    fix="Use a template that renders `tools`, or drop the parser.",
)
def template_without_tools(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        if not engine.flag("tool-call-parser") or engine.flag("chat-template"):
            continue
        for model in deployment.models:
            encoder = belongings(model, engine).get("encoder")
            if model.templates and not encoder and not any("tools" in text for text in model.templates.values()):
                yield Hit(engine.label, f"{model.path}: none of {', '.join(model.templates)} mentions tools")


@rule(
    "template-missing",
    "warning",
    "template",
    "The model has no chat template",
    why="Chat requests are then refused, or rendered with a default that is not the model's.",
    fix="Give the model's template with --chat-template.",
)
def template_missing(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        for model in deployment.models:
            encoder = belongings(model, engine).get("encoder")
            if model.has_tokenizer and not model.templates and not encoder and not engine.flag("chat-template"):
                yield Hit(engine.label, f"{model.path}: no chat_template.jinja, none in tokenizer_config.json")
