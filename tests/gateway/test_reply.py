"""What a reply measures of itself."""

from pathlib import Path

from closeranks.gateway.choice import Choice
from closeranks.gateway.completions import CompletionFormat
from closeranks.gateway.model import load
from closeranks.gateway.reply import Reply, Timing

from . import tiny


def test_a_token_counts_when_it_comes_not_when_its_text_is_shown(tmp_path: Path) -> None:
    """Text may be held back: it may become a stop string, or the markup of a call."""
    model = load(tiny.write(tmp_path / "model"))
    now = iter([3.0, 4.0, 9.0])
    shape = CompletionFormat("r", model, "m", 0, None, with_usage=False, streams=True)
    reply = Reply("r", shape, True, False, False, prompt_tokens=1, timing=Timing(1.0), clock=lambda: next(now))
    choice = Choice(0, reply, model.vocabulary, ["ab!"], [], lambda _: None)
    reply.add(choice)
    for letter, shown in (("a", b""), ("b", b""), ("c", b"abc")):
        choice.on_tokens(tiny.tokenizer().encode(letter).ids, [])
        assert (shown in reply.take()) if shown else not reply.take()
    assert (reply.timing.first, reply.timing.last) == (3.0, 9.0)
