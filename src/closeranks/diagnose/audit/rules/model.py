"""A model or tokenizer folder by itself: tokens, ids, ends."""

from collections.abc import Iterable

from closeranks.catalog.unsafe import families
from closeranks.diagnose.audit.model import Deployment, ModelFolder
from closeranks.diagnose.audit.rule import Hit, Open, rule
from closeranks.diagnose.audit.rules.parsers import family_of_model


def _markers(model: ModelFolder) -> list[str]:
    return list(families().get(family_of_model(model), {}).get("tokens", ()))


@rule(
    "marker-token-missing",
    "error",
    "tokenizer",
    "A marker of the model's format is no token of its tokenizer",
    why="Parsers that go by token id never see it, and the model spells it with ordinary tokens that split anywhere.",
    fix="Take tokenizer files of the same release as the weights.",
    refs=("cline#13348",),
)
def marker_token_missing(deployment: Deployment) -> Iterable[Hit | Open]:
    for model in deployment.models:
        missing = [token for token in _markers(model) if token not in model.added]
        if missing and (model.has_tokenizer or model.added):
            yield Hit(model.path, f"{model.model_type} without {', '.join(missing)}")


@rule(
    "marker-token-special",
    "error",
    "tokenizer",
    "A marker of the model's format is marked special",
    why="skip_special_tokens removes it: the sentinel vanishes and `<tool_calls>` is left in the text, which no parser "
    "recognises.",
    fix='Set "special": false for it in tokenizer.json, as the maker has it.',
)
def marker_token_special(deployment: Deployment) -> Iterable[Hit | Open]:
    for model in deployment.models:
        special = [token for token in _markers(model) if model.added.get(token)]
        if special:
            yield Hit(model.path, f"special: {', '.join(special)}")


@rule(
    "token-beyond-vocabulary",
    "error",
    "tokenizer",
    "The tokenizer has ids that the model's vocabulary has not",
    why="Such an id reads beside the embedding table: an error inside a step on one rank, or a wrong row in silence.",
    fix="Take tokenizer and config of the same release.",
)
def token_beyond_vocabulary(deployment: Deployment) -> Iterable[Hit | Open]:
    for model in deployment.models:
        beyond = [f"{token} = {n}" for token, n in model.ids.items() if model.vocab_size and n >= model.vocab_size]
        if beyond:
            yield Hit(model.path, f"vocab_size {model.vocab_size}; {', '.join(beyond[:4])}")


@rule(
    "eos-not-an-end",
    "warning",
    "tokenizer",
    "The tokenizer's end-of-sequence token does not end generation",
    why="The model's own end is then generated through: turns run on until the length limit.",
    fix="Put its id into eos_token_id of generation_config.json.",
)
def eos_not_an_end(deployment: Deployment) -> Iterable[Hit | Open]:
    for model in deployment.models:
        ids = [model.ids[token] for token in model.eos_tokens if token in model.ids]
        if ids and model.eos_ids and not set(ids) & set(model.eos_ids):
            yield Hit(model.path, f"{model.eos_tokens[0]} = {ids[0]}; generation ends at {list(model.eos_ids)}")


@rule(
    "two-templates",
    "warning",
    "template",
    "The folder has two different chat templates",
    why="chat_template.jinja and tokenizer_config.json disagree; which one is used depends on the library's version, "
    "so two engines can render one request differently.",
    fix="Keep one, or make them equal.",
)
def two_templates(deployment: Deployment) -> Iterable[Hit | Open]:
    for model in deployment.models:
        one, two = model.templates.get("chat_template.jinja"), model.templates.get("tokenizer_config.json")
        if one is not None and two is not None and one.strip() != two.strip():
            yield Hit(model.path, f"chat_template.jinja has {len(one)} characters, tokenizer_config.json {len(two)}")
