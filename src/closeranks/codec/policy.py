"""The switches of the decoder, with the defaults for agents in production."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do where the format leaves a choice. docs/codec.md gives the reason of each default.

    text_after: text after a committed call. `drop` as the reference decoder does (reported), or `keep` as content.
        Text after a block that yielded no call is always kept.
    quoted: markup inside fenced or inline code, from text. `keep` it as a quotation, or `parse` it like any other.
        With token ids the question does not arise: there only added tokens are markup.
    bare_invoke_in_reasoning: an invoke without wrapper inside reasoning is a draft (`suppress`), or a call (`execute`).
    unknown_tool: an invoke of a tool that is not in `tools`: `drop` (reported), or `forward` it as a call.
    spelled: blocks whose sentinel is spelled otherwise (ASCII bars, doubled, spaced, absent), from text: `parse` them,
        `strip` them (markup goes, no call comes of it), or `pass` them on as text.
    malformed_parameter: a parameter without readable attributes, nested, or with a damaged closer: `drop_call`, or
        `keep_raw`: read the value as a string where the name is readable.
    duplicate_parameter: `drop_call`, or `keep_first`.
    unclosed_parameter: the invoke's closer arrives inside a value: `accept` the value (less its framing newline), or
        `drop_call`.
    broken_json: a string="false" object or array that stops being JSON after part of it was sent: `close` what is
        open, report the rest, keep the call; or `drop_call`. Broken scalars always become strings.
    direct_json: a JSON object as the body of an invoke: `parse` it as the arguments, or `drop_call`.
    wrapper_keys: a lone `arguments` or `input` parameter that the tool's schema does not know, holding an object
        whose first key it does know: `unwrap` it, or `keep` it.
    incomplete_call: the stream ends after all parameters closed but before the invoke did: `drop` it, or `accept` it.
    """

    text_after: Literal["drop", "keep"] = "drop"
    quoted: Literal["keep", "parse"] = "keep"
    bare_invoke_in_reasoning: Literal["suppress", "execute"] = "suppress"
    unknown_tool: Literal["drop", "forward"] = "drop"
    spelled: Literal["parse", "strip", "pass"] = "parse"
    malformed_parameter: Literal["drop_call", "keep_raw"] = "drop_call"
    duplicate_parameter: Literal["drop_call", "keep_first"] = "drop_call"
    unclosed_parameter: Literal["accept", "drop_call"] = "accept"
    broken_json: Literal["close", "drop_call"] = "close"
    direct_json: Literal["parse", "drop_call"] = "parse"
    wrapper_keys: Literal["unwrap", "keep"] = "unwrap"
    incomplete_call: Literal["drop", "accept"] = "drop"


DEFAULT = Policy()
