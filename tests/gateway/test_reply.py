"""What a reply measures of itself, and that nothing follows its end."""

from pathlib import Path

import pytest

from closeranks.gateway.choice import Choice
from closeranks.gateway.completions import CompletionFormat
from closeranks.gateway.model import load
from closeranks.gateway.reply import DONE, Reply, Timing
from closeranks.gateway.resume import End

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


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_nothing_follows_an_error_that_ended_the_answer(tmp_path: Path, streams: bool, begun: bool) -> None:
    """One choice of two fails; the other goes on before anybody has written the error out."""
    model = load(tiny.write(tmp_path / "model"))
    shape = CompletionFormat("r", model, "m", 0, None, with_usage=True, streams=streams)
    reply = Reply("r", shape, streams, True, False, prompt_tokens=1, timing=Timing(1.0), clock=lambda: 2.0)
    failing, other = (Choice(i, reply, model.vocabulary, [], [], lambda _: None) for i in (0, 1))
    reply.add(failing)
    reply.add(other)
    token = tiny.tokenizer().encode("a").ids
    if begun:
        other.on_tokens(token, [])
    failing.on_end(End("fault", "it broke"))
    other.on_tokens(token, [])
    other.on_end(End("stop"))
    reply.comment(b"waiting")
    data = reply.take()
    assert reply.error is not None
    assert reply.error.code == "engine_error"
    if streams:
        assert data.endswith(b"\n\n" + DONE)
        assert data.count(b"data: ") == (3 if begun else 2)
    else:
        assert data == b""
