"""Each policy and each rule of the table, by example: what the default does, and what the switch changes."""

import json
from typing import Any

import pytest

from closeranks.codec import (
    Decoder,
    Policy,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Turn,
    assemble,
    dialect_of,
)

D = "｜DSML｜"


def invoke(name: str, *parameters: str) -> str:
    return f'<{D}invoke name="{name}">\n' + "".join(p + "\n" for p in parameters) + f"</{D}invoke>\n"


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<{D}parameter name="{name}" string="{string}">{value}</{D}parameter>'


def block(*invokes: str) -> str:
    return f"\n\n<{D}tool_calls>\n" + "".join(invokes) + f"</{D}tool_calls>"


def turn(text: str, policy: dict[str, Any] | None = None, finish: str = "stop", **settings: Any) -> Turn:
    decoder = Decoder(policy=Policy(**(policy or {})), **settings)
    return assemble(decoder.feed(text) + decoder.close(finish))


def calls(made: Turn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in made.tool_calls]


def reasons(made: Turn) -> set[str]:
    return {part.reason for part in made.discarded}


CALL = block(invoke("f", parameter("a", "x")))
DONE = [("f", {"a": "x"})]


def test_text_after_a_call_is_dropped_or_kept() -> None:
    made = turn("Hi." + CALL + "\nBye.")
    assert (made.content, calls(made), reasons(made)) == ("Hi.", DONE, {"after_call"})
    made = turn("Hi." + CALL + "\nBye.", {"text_after": "keep"})
    assert (made.content, calls(made), made.discarded) == ("Hi.\nBye.", DONE, ())


def test_text_after_a_block_without_a_call_is_kept() -> None:
    made = turn("Summary." + CALL + "\nThe answer is 42.", tools=[])
    assert (made.content, calls(made)) == ("Summary.\nThe answer is 42.", [])
    assert reasons(made) == {"tools_disabled"}


@pytest.mark.parametrize(
    ("before", "after"), [("```xml\n", "\n```\n"), ("~~~\n", "\n~~~\n"), ("  ```\n", "\n  ```\n"), ("so `", "` is how")]
)
def test_quoted_markup_is_kept_and_never_run(before: str, after: str) -> None:
    quoted = before + CALL.strip() + after
    assert turn(quoted).content == quoted
    assert turn(quoted).tool_calls == ()
    assert calls(turn(quoted, {"quoted": "parse"})) == DONE


def test_a_call_after_a_quotation_runs() -> None:
    made = turn("Say `<" + D + 'invoke name="x">` so.' + CALL)
    assert (made.content, calls(made)) == ("Say `<" + D + 'invoke name="x">` so.', DONE)


def test_an_unbalanced_backtick_ends_with_its_paragraph() -> None:
    assert calls(turn("The ` key." + CALL)) == DONE


def test_reasoning_ends_inside_unbalanced_code_but_not_at_a_quoted_tag() -> None:
    made = turn("a ``` b\n```python\nx</think>Answer", thinking=True)
    assert (made.reasoning, made.content) == ("a ``` b\n```python\nx", "Answer")
    made = turn("the `</think>` tag</think>Answer", thinking=True)
    assert (made.reasoning, made.content) == ("the `</think>` tag", "Answer")


def test_a_bare_invoke_in_reasoning_is_a_draft() -> None:
    text = "draft: " + invoke("f", parameter("a", "x")) + "no</think>Hi"
    made = turn(text, thinking=True)
    assert (made.reasoning, made.content, calls(made)) == ("draft: \nno", "Hi", [])
    assert reasons(made) == {"draft_in_reasoning"}
    assert calls(turn(text, {"bare_invoke_in_reasoning": "execute"}, thinking=True)) == DONE


def test_a_block_ends_reasoning() -> None:
    made = turn("Plan." + CALL + "</think>", thinking=True)
    assert (made.reasoning, made.content, calls(made)) == ("Plan.", "", DONE)


def test_unknown_tools_are_dropped_or_forwarded() -> None:
    made = turn(CALL, tools=["g"])
    assert (calls(made), reasons(made)) == ([], {"tool_not_offered"})
    assert calls(turn(CALL, {"unknown_tool": "forward"}, tools=["g"])) == DONE
    assert calls(turn(CALL, tools=["f"])) == DONE
    assert calls(turn(CALL, tools=[{"type": "function", "function": {"name": "f"}}])) == DONE


def test_tool_choice() -> None:
    assert calls(turn(CALL, tools=["f"], tool_choice="none")) == []
    assert calls(turn(CALL, tools=["f"], tool_choice="required")) == DONE
    assert calls(turn(CALL, tools=["f", "g"], tool_choice={"type": "function", "function": {"name": "f"}})) == DONE
    assert calls(turn(CALL, tools=["f", "g"], tool_choice={"type": "function", "function": {"name": "g"}})) == []


@pytest.mark.parametrize(("allowed", "want"), [("f", DONE), ("g", [])])
def test_tools_that_are_offered_and_not_allowed_are_not_called(allowed: str, want: list[Any]) -> None:
    tools = {"mode": "auto", "tools": [{"type": "function", "function": {"name": allowed}}, 7]}
    for choice in ({"type": "allowed_tools", "allowed_tools": tools}, {"type": "allowed_tools", **tools}):
        assert calls(turn(CALL, tools=["f", "g"], tool_choice=choice)) == want


@pytest.mark.parametrize("bars", ["|DSML|", "||DSML||", " | DSML | ", "‖DSML‖", "│DSML│", "￨DSML￨", "｜ DSML ｜", ""])
def test_spelled_blocks(bars: str) -> None:
    text = "Hi." + CALL.replace(D, bars)
    made = turn(text)
    assert (made.content, calls(made)) == ("Hi.", DONE)
    made = turn(text, {"spelled": "strip"})
    assert (made.content, calls(made), reasons(made)) == ("Hi.", [], {"spelled_markup"})
    made = turn(text, {"spelled": "pass"})
    assert (made.content, calls(made)) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "The format is <|DSML|tool_calls> in ASCII.",
        'Use <invoice name="x"> and </parameters>.',
        "Close it with </invoke>, then </parameter>.",
        '<invoke name="x"> alone does nothing.',
        "a <|b|> c < | d",
        "In this notation a <｜ b means relation.",
    ],
)
def test_look_alikes_that_open_no_invoke_are_text(text: str) -> None:
    made = turn(text)
    assert (made.content, made.discarded) == (text, ())


def test_malformed_parameters() -> None:
    odd = f'<{D}parameter name="a">x</{D}parameter>'
    made = turn(block(invoke("f", odd), invoke("g", parameter("b", "y"))))
    assert (calls(made), reasons(made)) == ([("g", {"b": "y"})], {"malformed_parameter"})
    assert calls(turn(block(invoke("f", odd)), {"malformed_parameter": "keep_raw"})) == DONE
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    assert calls(turn(block(invoke("f", odd)), tools=[tool])) == DONE


def test_a_damaged_closer_drops_the_call_rather_than_cut_a_command() -> None:
    damaged = block(f'<{D}invoke name="f">\n<{D}parameter name="a" string="true">x</{D}parameter |\nrm\n</{D}invoke>\n')
    assert calls(turn(damaged)) == []


def test_duplicate_parameters() -> None:
    text = block(invoke("f", parameter("a", "x"), parameter("a", "y")))
    assert (calls(turn(text)), reasons(turn(text))) == ([], {"duplicate_parameter"})
    assert calls(turn(text, {"duplicate_parameter": "keep_first"})) == DONE


def test_unclosed_parameter() -> None:
    text = block(f'<{D}invoke name="f">\n<{D}parameter name="a" string="true">x\n</{D}invoke>\n')
    assert calls(turn(text)) == DONE
    assert calls(turn(text, {"unclosed_parameter": "drop_call"})) == []


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Bob", "Bob"),
        ("NaN", "NaN"),
        ("True", True),
        ("None", None),
        ("01", "01"),
        ("12345e-3", 12.345),
        ("9" * 5000, "9" * 5000),
        ("{'a': 1}", "{'a': 1}"),
        ("[1, 2", [1, 2]),
        ('{"k": "v', {"k": "v"}),
        ('["\\ud83d"]', ["\ufffd"]),
        ("[NaN, True]", ["NaN", True]),
        ("", ""),
    ],
)
def test_values_that_are_not_quite_json(written: str, read: Any) -> None:
    assert calls(turn(block(invoke("f", parameter("a", written, "false"))))) == [("f", {"a": read})]


def test_a_broken_container_can_drop_the_call() -> None:
    made = turn(block(invoke("f", parameter("a", "[1, 2", "false"))), {"broken_json": "drop_call"})
    assert (calls(made), reasons(made)) == ([], {"malformed_json"})


def test_direct_json_body() -> None:
    text = block(f'<{D}invoke name="f">\n{{"a": "x"}}\n</{D}invoke>\n')
    assert calls(turn(text)) == DONE
    assert calls(turn(text, {"direct_json": "drop_call"})) == []


def test_wrapper_keys() -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {}}}}
    text = block(invoke("f", parameter("arguments", '{"a": "x"}', "false")))
    assert calls(turn(text, tools=[tool])) == DONE
    assert calls(turn(text)) == [("f", {"arguments": {"a": "x"}})]
    assert calls(turn(text, {"wrapper_keys": "keep"}, tools=[tool])) == [("f", {"arguments": {"a": "x"}})]
    strange = block(invoke("f", parameter("arguments", '{"z": "x"}', "false")))
    assert calls(turn(strange, tools=[tool])) == [("f", {"arguments": {"z": "x"}})]


def test_a_cut_call_is_none_and_its_arguments_do_not_parse() -> None:
    text = CALL[: CALL.index(f"</{D}invoke>") + 4]
    decoder = Decoder()
    events = decoder.feed(text) + decoder.close("length")
    assert ToolCallStart(0, "f") in events
    assert ToolCallEnd(0, False, "cut") in events
    sent = "".join(event.delta for event in events if isinstance(event, ToolCallArguments))
    with pytest.raises(json.JSONDecodeError):
        json.loads(sent)
    assert calls(turn(text, {"incomplete_call": "accept"}, finish="length")) == DONE


def test_reopened_think_and_late_think() -> None:
    made = turn("<think>r</think></think>ok", thinking=True)
    assert (made.reasoning, made.content) == ("r", "ok")
    made = turn("<think>r</think>ok")
    assert (made.reasoning, made.content) == ("r", "ok")
    made = turn("about the <think> tag")
    assert (made.reasoning, made.content) == ("", "about the  tag")


def test_a_mention_is_no_block_and_the_text_stays() -> None:
    made = turn(f"A <{D}tool_calls> tag opens, a </{D}tool_calls> tag closes.")
    assert made.content == "A  tag opens, a  tag closes."
    made = turn(f"A <{D}foo> tag.")
    assert made.content == "A  tag."


def test_arguments_stream_byte_by_byte() -> None:
    decoder = Decoder()
    decoder.feed(CALL[: CALL.index("x<")])
    assert decoder.feed("h") == [ToolCallArguments(0, "h")]
    assert decoder.feed('"\n') == [ToolCallArguments(0, '\\"')]
    assert decoder.feed("é") == [ToolCallArguments(0, "\\né")]


def test_hermes() -> None:
    text = 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    made = turn(text, dialect="hermes")
    assert (made.content, calls(made)) == ("Hi.", DONE)
    swapped = '<tool_call>{"arguments": "{\\"a\\": \\"x\\"}", "name": "f"}</tool_call>'
    assert calls(turn(swapped, dialect="hermes")) == DONE
    assert calls(turn('<tool_call>{"name": "f", "args": {}}</tool_call>', dialect="hermes")) == []


def test_bytes_are_taken_cut_anywhere_and_kinds_do_not_mix_with_ids() -> None:
    decoder = Decoder(thinking=True)
    data = "é🙂".encode()
    events = [event for i in range(len(data)) for event in decoder.feed(data[i : i + 1])] + decoder.close()
    assert assemble(events).reasoning == "é🙂"
    assert events[0] == Reasoning("é")
    with pytest.raises(TypeError, match="tokenizer"):
        Decoder().feed([1, 2])
    with pytest.raises(TypeError, match="not int"):
        Decoder().feed(7)  # type: ignore[arg-type]


def test_errors_say_what_is_known() -> None:
    with pytest.raises(ValueError, match="v32, v4, v41, hermes"):
        dialect_of("v5")
    with pytest.raises(TypeError, match="a tool is a name or a mapping"):
        Decoder(tools=[7])


def test_text_after_a_parameter_without_an_invoke_goes_on() -> None:
    parameter = f'<{D}parameter name="a" string="true">1</{D}parameter>'
    made = turn(f"Set {parameter}\n{parameter}\nand go on. " + CALL)
    assert (made.content, calls(made), reasons(made)) == ("Set and go on. ", DONE, {"malformed_invoke"})


def test_an_attribute_more_is_not_part_of_the_name() -> None:
    made = turn(CALL.replace(" string=", ' type="string" string='))
    assert (calls(made), reasons(made)) == (DONE, set())
