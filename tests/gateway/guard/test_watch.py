"""The guard's core: a clean stream passes byte for byte, a leak never does, wherever the bytes are cut."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.codec import Decoder, assemble
from closeranks.gateway.guard import Counters, StreamWatch, decoders
from closeranks.gateway.guard.asked import Asked
from closeranks.gateway.guard.body import watch_body
from tests.gateway.guard.doubles import DONE, client, event, tools

CASES = [json.loads(line) for line in (Path(__file__).parents[2] / "corpus" / "dsml.jsonl").read_text().splitlines()]
BLOCK = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
OSLO = [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
MARKUP = ("DSML", "</think>", "<think>", "</invoke", "</parameter")


def watch(*names: str, counters: Counters | None = None, **options: Any) -> StreamWatch:
    asked = Asked(tuple(tools(*names)))
    make = decoders()
    return StreamWatch(lambda thinking: make(asked, thinking), counters or Counters(), **options)


def run(stream: bytes, *names: str, cuts: list[int] | None = None, **options: Any) -> bytes:
    core = watch(*names, **options)
    points = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts or [])})
    out = b"".join(core.feed(stream[a:b]) for a, b in itertools.pairwise(points))
    return out + core.close()


def pieces(text: str, seed: int, most: int = 12) -> list[str]:
    """`text` cut at random."""
    rng = random.Random(seed)
    out = []
    while text:
        size = rng.randint(1, most)
        out.append(text[:size])
        text = text[size:]
    return out


def stream_of(texts: list[str], field: str = "content", finish: str | None = "stop", done: bool = True) -> bytes:
    out = event(role="assistant", content="") + b"".join(event(**{field: text}) for text in texts)
    return out + (event(finish=finish) if finish else b"") + (DONE if done else b"")


# Clean streams ------------------------------------------------------------------------------------------------------

WORDS = [
    "Hello",
    " ",
    "\n",
    "\n\n",
    "a < b",
    "<",
    "<b>",
    "|",
    "1|2",
    "`x`",
    "```\n",
    "é",
    "🙂",
    "<|",
    "</p>",
    "a >",
    "｜",
    "\\",
]
CLEAN_TEXT = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
CLEAN_EVENT = st.one_of(
    CLEAN_TEXT.map(lambda t: event(content=t)),
    CLEAN_TEXT.map(lambda t: event(index=1, content=t)),
    CLEAN_TEXT.map(lambda t: event(reasoning_content=t)),
    CLEAN_TEXT.map(lambda t: event(content=t).replace(b"\n\n", b"\r\n\r\n")),
    CLEAN_TEXT.map(lambda t: b"event: x\nid: 1\n" + event(content=t)),
    st.sampled_from(
        [
            b": ping\n\n",
            b"data: not json\n\n",
            b"data: [1]\n\n",
            b"\n\n",
            b"retry: 5\n\n",
            b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n',
            b'data: {"choices":[{"index":0,"delta":{"content":"a\xff"}}]}\n\n',
            b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"two lines"}}]}\n\n',
            b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n',
            b'data: {"choices":[{"index":0,"delta":{"content":7}}]}\n\n',
            b'data: {"choices":[{"index":0,"delta":null}], "x": 1.10}\n\n',
            b'data: {"error":{"message":"<no>"}}\n\n',
            event(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a": "<b>"}'}}]),
            event(finish="stop"),
        ]
    ),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(CLEAN_EVENT, max_size=12),
    st.lists(st.integers(0, 5000), max_size=8),
    st.sampled_from([b"", DONE, b"data: x"]),
)
def test_a_clean_stream_passes_byte_for_byte(events: list[bytes], cuts: list[int], end: bytes) -> None:
    """Comments may overtake events that wait (they are signs of life), so they are compared on their own."""
    stream = b"".join(events) + end
    out = run(stream, "f", cuts=cuts)
    ping = b": ping\n\n"
    assert out.replace(ping, b"") == stream.replace(ping, b"")
    assert out.count(ping) == stream.count(ping)


def test_text_leaves_at_once_unless_it_might_begin_markup() -> None:
    core = watch("f")
    assert core.feed(event(content="Hello")) == event(content="Hello")
    assert core.feed(event(content="a <")) == b""
    assert core.feed(event(content=" b")) == event(content="a <") + event(content=" b")


def test_a_comment_does_not_wait_behind_text_that_does() -> None:
    core = watch("f")
    core.feed(event(content="a <"))
    assert core.feed(b": ping\n\n") == b": ping\n\n"


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_any_bytes_pass_unchanged_if_they_are_no_events_of_a_chat(data: bytes, cuts: list[int]) -> None:
    assert run(data, "f", cuts=cuts) == data


# Leaks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_a_leaked_call_of_an_offered_tool_becomes_a_tool_call(seed: int, field: str) -> None:
    stream = stream_of(pieces("Let me see.\n\n" + BLOCK, seed), field)
    seen = client(run(stream, "get_weather", cuts=[seed * 37 + n * 101 for n in range(20)]))[0]
    assert seen.tool_calls == OSLO
    assert seen.finish == "tool_calls"
    assert (seen.content + seen.reasoning).strip() == "Let me see."


def test_a_leaked_call_of_a_tool_that_was_not_offered_is_stripped() -> None:
    for offered in ([], ["other"]):
        seen = client(run(stream_of(pieces("Hi.\n\n" + BLOCK, 3)), *offered))[0]
        assert (seen.content.strip(), seen.tool_calls, seen.finish) == ("Hi.", [], "stop")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_shape_of_the_corpus_cut_at_random(case: dict[str, Any]) -> None:
    """As content of an upstream that parses nothing: a client gets what the decoder makes of it in one piece."""
    names = sorted({call["name"] for call in case["expected_tool_calls"]} | set(case.get("tools") or []))
    offered = [] if case.get("tool_choice") == "none" else names
    text = case["model_output"]
    decoder = Decoder(dialect="v4", thinking=False, tools=tools(*offered))
    turn = assemble([*decoder.feed(text), *decoder.close()])
    want = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in turn.tool_calls]
    for seed in range(4):
        stream = stream_of(pieces(text, seed), finish=case["finish_reason"])
        out = run(stream, *offered, cuts=[seed * 57 + n * 211 for n in range(30)])
        seen = client(out)[0]
        complete = {i: c for i, c in seen.calls.items() if c["arguments"].endswith("}") and valid(c["arguments"])}
        seen.calls = complete
        assert (seen.content, seen.reasoning, seen.tool_calls) == (turn.content, turn.reasoning, want)
        assert out.endswith(DONE)


@pytest.mark.parametrize("case", [c for c in CASES if c.get("thinking")], ids=lambda case: case["id"])
def test_the_corpus_behind_an_upstream_that_splits_the_reasoning_off(case: dict[str, Any]) -> None:
    names = sorted({call["name"] for call in case["expected_tool_calls"]} | set(case.get("tools") or []))
    thought, _, rest = case["model_output"].partition("</think>")
    stream = b"".join(event(reasoning_content=text) for text in pieces(thought, 1))
    stream += b"".join(event(content=text) for text in pieces(rest, 2)) + event(finish=case["finish_reason"])
    seen = client(run(stream, *names))[0]
    assert seen.content.strip("\n") == case["expected_content"].strip("\n")
    assert seen.reasoning.strip("\n") == case["expected_reasoning"].strip("\n")
    assert seen.tool_calls == case["expected_tool_calls"]


def valid(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_answer_in_one_piece_equals_the_stream(case: dict[str, Any]) -> None:
    names = sorted({call["name"] for call in case["expected_tool_calls"]} | set(case.get("tools") or []))
    seen = client(run(stream_of([case["model_output"]], finish=case["finish_reason"]), *names))[0]
    seen.calls = {i: c for i, c in seen.calls.items() if valid(c["arguments"])}
    asked = Asked(tuple(tools(*names)))
    message = {"role": "assistant", "content": case["model_output"]}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": case["finish_reason"]}]}).encode()
    whole = json.loads(watch_body(body, lambda thinking: decoders()(asked, thinking), Counters()))["choices"][0]
    calls = [
        {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
        for c in whole["message"].get("tool_calls") or ()
    ]
    assert (whole["message"]["content"] or "", calls) == (seen.content, seen.tool_calls)
    assert (whole["message"].get("reasoning_content") or "") == seen.reasoning
    assert whole["finish_reason"] == seen.finish


def test_arguments_are_counted_and_never_rewritten() -> None:
    counters = Counters()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a": "'}}
    text = "</｜DSML｜parameter>"
    stream = event(tool_calls=[call])
    stream += b"".join(event(tool_calls=[{"index": 0, "function": {"arguments": c}}]) for c in text) + DONE
    assert run(stream, "f", counters=counters) == stream
    assert dict(counters.leaks) == {("m", "arguments", "argument_parameter", "counted"): 1}


def test_report_only_changes_nothing_and_counts() -> None:
    counters = Counters()
    stream = stream_of(pieces("Hi.\n\n" + BLOCK + "\n</｜DSML｜parameter>", 5))
    assert run(stream, "get_weather", counters=counters, report_only=True) == stream
    assert counters.leaks["m", "content", "call", "reported"] == 1
    assert sum(counters.leaks.values()) >= 2


def test_samples_are_redacted() -> None:
    counters = Counters()
    run(stream_of([BLOCK.replace("Oslo", "my secret 1234")]), "get_weather", counters=counters)
    sample = counters.samples[-1]
    assert sample["shape"] == "call"
    assert "DSML" in sample["text"]
    for secret in ("secret", "1234", "get_weather", "city"):
        assert secret not in sample["text"]


def test_calls_of_both_the_upstream_and_the_guard_have_different_indices() -> None:
    native = [{"index": 0, "id": "up", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
    stream = event(content=BLOCK) + event(tool_calls=native) + event(content=BLOCK) + event(finish="tool_calls") + DONE
    seen = client(run(stream, "get_weather", "get_time"))[0]
    assert [c["name"] for c in seen.tool_calls] == ["get_weather", "get_time", "get_weather"]


def test_choices_do_not_mix() -> None:
    parts = [pieces("A" + BLOCK, 1), pieces("B <b> plain\n\ntext", 2), pieces(BLOCK + "\n", 3)]
    stream = b""
    for row in range(max(map(len, parts))):
        stream += b"".join(event(index=i, content=part[row]) for i, part in enumerate(parts) if row < len(part))
    stream += b"".join(event(index=i, finish="stop") for i in range(3)) + DONE
    seen = client(run(stream, "get_weather", cuts=[n * 97 for n in range(40)]))
    assert [seen[i].tool_calls for i in range(3)] == [OSLO, [], OSLO]
    assert [seen[i].content.strip() for i in range(3)] == ["A", "B <b> plain\n\ntext", ""]
    assert [seen[i].finish for i in range(3)] == ["tool_calls", "stop", "tool_calls"]


def test_several_choices_in_one_event() -> None:
    def both(a: str, b: str) -> bytes:
        choices = [{"index": i, "delta": {"content": t}, "finish_reason": None} for i, t in enumerate((a, b))]
        return b"data: " + json.dumps({"id": "c", "choices": choices}).encode() + b"\n\n"

    one, two = pieces("A\n\n" + BLOCK, 4), pieces("plain " * 40, 5)
    stream = b"".join(both(a, b) for a, b in zip(one, two, strict=False))
    seen = client(run(stream + DONE, "get_weather"))
    assert seen[0].tool_calls == OSLO
    assert seen[1].content == "".join(two[: len(one)])


def test_what_an_event_holds_besides_text_survives_rewriting() -> None:
    delta = {"role": "assistant", "content": "hi </｜DSML｜invoke>", "x": [1]}
    logprobs = {"content": [{"token": "</｜DSML｜invoke>"}]}
    sent = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": 5}
    top = {"id": "c", "x_float": 1.10, "usage": {"total_tokens": 7}, "choices": [sent]}
    out = run(b"id: 9\ndata: " + json.dumps(top).replace("1.1,", "1.10,").encode() + b"\n\n")
    assert out.startswith(b"id: 9\n")
    assert b'"x_float":1.10' in out
    chunk = json.loads(out.split(b"data: ")[1])
    choice = chunk["choices"][0]
    assert choice["delta"] == {"role": "assistant", "x": [1], "content": "hi "}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", 5, None)
    assert chunk["usage"] == {"total_tokens": 7}


def test_reasoning_keeps_the_name_that_the_upstream_uses() -> None:
    out = run(event(reasoning="so </｜DSML｜invoke>") + DONE)
    assert json.loads(out.split(b"data: ")[1])["choices"][0]["delta"] == {"reasoning": "so "}


@pytest.mark.parametrize("end", [b"", DONE])
@pytest.mark.parametrize("cut", range(0, len(BLOCK), 7))
def test_a_stream_that_stops_anywhere_leaks_nothing(cut: int, end: bytes) -> None:
    stream = b"".join(event(content=text) for text in pieces("Hi " + BLOCK[:cut], 8)) + end
    seen = client(run(stream, "get_weather"))[0]
    assert not any(mark in seen.content for mark in MARKUP)
    assert seen.content.strip() in ("Hi", "Hi \n<", "Hi \n<｜")  # a bracket and a bar are no markup yet


def test_an_error_event_ends_a_broken_stream_after_what_was_held_back() -> None:
    core = watch("f")
    assert core.feed(event(content="a <")) == b""
    assert core.close(b'{"error":{}}') == event(content="a <") + b'data: {"error":{}}\n\n'


@pytest.mark.parametrize(
    "extra",
    [
        b'"logprobs":NaN',
        b'"x":"\\ud83d"',
        b'"x":"\xff"',
        b'"x":"a\tb"',
        b'"x":1e999',
        b'"x":123456789012345678901234567890',
    ],
)
def test_markup_does_not_slip_through_in_json_that_only_a_forgiving_client_reads(extra: bytes) -> None:
    leak = "a </｜DSML｜invoke>".encode()
    out = run(b'data: {"choices":[{"index":0,"delta":{"content":"' + leak + b'"},' + extra + b"}]}\n\n" + DONE)
    assert b"DSML" not in out
    assert b'"content":"a "' in out


ODD = [
    ({"index": None}, {}, []),
    ({"index": "0"}, {}, []),
    ({"index": 0.0}, {}, []),
    ({"index": True}, {}, []),
    ({"index": -1}, {}, []),
    ({"index": 10**30}, {}, []),
    ({}, {}, []),
    ({"index": 0}, {}, [None, "x", 7, []]),
    ({"index": 0, "finish_reason": ["stop"]}, {}, []),
    ({"index": 0}, {"tool_calls": {}}, []),
    ({"index": 0}, {"tool_calls": "x"}, []),
    ({"index": 0}, {"tool_calls": [None, 7, {"index": "0", "function": "f"}, {"index": None}]}, []),
    ({"index": 0}, {"reasoning": 7, "reasoning_content": {}}, []),
]


@pytest.mark.parametrize(("choice", "text", "before"), ODD, ids=str)
@pytest.mark.parametrize("leak", ["a </｜DSML｜invoke> b", "a\n\n" + BLOCK])
def test_markup_does_not_slip_through_beside_members_of_another_type(
    choice: dict[str, Any], text: dict[str, Any], before: list[Any], leak: str
) -> None:
    """A client that checks no types is shown no markup, in a stream and in one piece."""
    own = {"content": leak, **text}
    choices = [*before, {**choice, "delta": own}]
    out = run(b"data: " + json.dumps({"choices": choices}, ensure_ascii=False).encode() + b"\n\n" + DONE, "get_weather")
    assert "DSML" not in out.decode()
    assert b'"content":"a' in out
    assert (b"Oslo" in out) is ("Oslo" in leak)
    whole = json.dumps({"choices": [*before, {**choice, "message": own}]}, ensure_ascii=False).encode()
    asked = Asked(tuple(tools("get_weather")))
    answer = watch_body(whole, lambda thinking: decoders()(asked, thinking), Counters())
    assert "DSML" not in answer.decode()
    assert json.loads(answer)["choices"][: len(before)] == before
    message = json.loads(answer)["choices"][-1]["message"]
    assert message["content"].startswith("a")
    assert [c["function"]["name"] for c in message.get("tool_calls") or () if isinstance(c, dict) and "id" in c] == (
        ["get_weather"] if "Oslo" in leak else []
    )


def test_two_choices_of_one_index_lose_nothing() -> None:
    both = [{"index": 0, "delta": {"content": text}} for text in ("one </｜DSML｜invoke>", " two")]
    out = run(b"data: " + json.dumps({"choices": both}).encode() + b"\n\n" + DONE)
    assert client(out)[0].content == "one  two"


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_body_in_another_encoding_is_read_as_clients_read_it(coding: str) -> None:
    """`json.loads` of bytes, which the `openai` client calls, takes all of these."""
    message = {"content": "a </｜DSML｜invoke>"}
    body = json.dumps({"choices": [{"index": 0, "message": message}]}, ensure_ascii=False).encode(coding)
    answer = watch_body(body, lambda thinking: decoders()(Asked(), thinking), Counters())
    assert json.loads(answer)["choices"][0]["message"]["content"] == "a "


@pytest.mark.parametrize("done", [b"data: [DONE] \n\n", b"data:[DONE]\r\n\r\n", b"event: x\ndata: [DONE]\n\n"])
def test_what_is_held_back_leaves_before_the_end_however_that_is_written(done: bytes) -> None:
    out = run(event(content="a <") + done)
    assert out == event(content="a <") + done


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning_content", "reasoning")])
def test_reasoning_that_was_held_back_keeps_its_names(names: tuple[str, ...]) -> None:
    """What waits leaves with an event of content, or after the last event: neither says what reasoning is called."""
    thought = event(**dict.fromkeys(names, "so a <"))
    for rest in (event(content="Hi </｜DSML｜invoke>") + DONE, b"data: [DONE]\n\n", b""):
        sent = event(**dict.fromkeys(names, "I </｜DSML｜invoke>")) + thought + rest
        found = dict.fromkeys(names, "")
        for line in run(sent).splitlines():
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                assert set(delta) <= {*names, "content"}
                for name in names:
                    found[name] += delta.get(name) or ""
        assert found == dict.fromkeys(names, "I so a <")


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_nesting_without_end_passes_as_what_it_is(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    for data in (deep, b'{"x":' + deep + b"}", b'{"choices":[{"index":0,"delta":{"content":' + deep + b"}}]}"):
        stream = b"data: " + data + b"\n\n" + event(content="a")
        assert run(stream, "f") == stream
        assert watch_body(data, lambda thinking: decoders()(Asked(), thinking), Counters()) == data


def without_deltas(stream: bytes) -> list[bytes]:
    """The stream's events less what depends on the cut: ids of calls, and how a text is spread over deltas."""
    kept = [e for e in stream.split(b"\n\n") if b'"delta"' not in e]
    texts = re.findall(rb'"(?:content|arguments)": ?"((?:[^"\\]|\\.)*)"', stream)
    return [*kept, b"".join(texts)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_stream_never_breaks_the_guard(data: st.DataObject) -> None:
    """Bytes flipped, dropped and doubled anywhere: no exception, and what was fed without markup is still all there."""
    stream = bytearray(stream_of(pieces("Hi.\n\n" + BLOCK, data.draw(st.integers(0, 99)))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(stream) - 1))
        match data.draw(st.sampled_from("fdx")):
            case "f":
                stream[at] = data.draw(st.integers(0, 255))
            case "d":
                del stream[at : at + data.draw(st.integers(1, 40))]
            case _:
                stream[at:at] = stream[at : at + data.draw(st.integers(1, 40))]
    cuts = data.draw(st.lists(st.integers(0, 20000), max_size=6))
    whole, cut = (run(bytes(stream), "get_weather", cuts=c) for c in ([], cuts))
    assert without_deltas(cut) == without_deltas(whole)


# Bounds --------------------------------------------------------------------------------------------------------------


def test_an_oversized_event_passes_and_is_counted() -> None:
    counters = Counters()
    huge = event(content="x" * 5000)
    stream = event(content="a") + huge + event(content="b" + BLOCK) + DONE
    out = run(stream, "get_weather", counters=counters, max_event=2000, cuts=list(range(0, 9000, 700)))
    assert out.startswith(event(content="a") + huge)
    assert client(out)[0].tool_calls == OSLO
    assert counters.unwatched["event_too_large"] >= 1


def test_what_waits_is_bounded() -> None:
    """Choice 0 holds a `<` back for ever while choice 1 goes on."""
    core = watch("f", max_waiting=4096)
    core.feed(event(index=0, content="a <"))
    most = 0
    sent = b""
    for _ in range(500):
        sent += core.feed(event(index=1, content="words and more words"))
        most = max(most, core._waiting_bytes)
    assert most <= 4096 + 200
    seen = client(sent + core.close())
    assert seen[1].content == "words and more words" * 500
    assert seen[0].content == "a <"


def test_label_values_from_an_upstream_are_bounded() -> None:
    counters = Counters()
    for number in range(1000):
        run(event(content="</｜DSML｜invoke>").replace(b'"m"', b'"m%d"' % number), counters=counters)
    assert len({key[0] for key in counters.leaks}) <= 65
