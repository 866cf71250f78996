"""Grammars on the sampling rank: which tokens may come next. A function of the grammar and of the output so far.

They are compiled on a thread of their own, when the leader asks; a row begins with one only after the leader has heard
that it is there, so no step waits for a compiler. What cannot be compiled is said to the leader with the place at
fault, and ends the requests that asked for it, nothing else.
"""

import json
import queue
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch

from closeranks.protocol import Compile, Compiled, Sampling

from .blame import blame

KINDS = ("json_schema", "ebnf", "structural_tag")
_LENGTH = re.compile(r'^(\w+ ::= \(\()\[\^\\"\\\\\\r\\n\](\)\))$', re.MULTILINE)
"""A character of a string that has a length, as xgrammar writes it: tabs and other control characters come raw, which
JSON does not admit. (It has them right in every other string.)"""
CACHE_BYTES = 256 * 2**20
"""Of parts that the compiler keeps to be faster with similar grammars."""
SWITCH_S = 0.0005
"""While something compiles, the step loop gets the interpreter back within this time (Python's default: 5 ms)."""


class NotCompiled(RuntimeError):
    """A row begins with a grammar that is not there; leader and rank disagree. Ends the epoch."""


def json_grammar(schema: str, space: int | None) -> Any:
    """xgrammar's grammar of a JSON schema, held to what JSON admits. `space`: most white space in a row."""
    import xgrammar

    made = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=space)
    text, found = _LENGTH.subn(r'\g<1>[^\\0-\\x1f\\"\\\\]\g<2>', str(made))
    return xgrammar.Grammar.from_ebnf(text) if found else made


def strict(tag: str) -> str:
    """A structural tag with `json_grammar` in the place of each schema whose strings have lengths.

    Raises what `json` and xgrammar raise for what is none.
    """
    if 'Length"' not in tag:
        return tag
    whole = json.loads(tag)
    if not isinstance(whole, dict):
        return tag
    return json.dumps({**whole, "format": _strict(whole.get("format"))}, ensure_ascii=False)


def _strict(format: Any) -> Any:
    if not isinstance(format, dict):
        return format
    if format.get("type") == "json_schema" and format.keys() <= {"type", "json_schema", "max_whitespace_cnt"}:
        schema = json.dumps(format.get("json_schema"), ensure_ascii=False)
        if 'Length"' not in schema:
            return format
        return {"type": "grammar", "grammar": str(json_grammar(schema, format.get("max_whitespace_cnt")))}
    made = dict(format)
    if "content" in made:
        made["content"] = _strict(made["content"])
    if "elements" in made:
        made["elements"] = [_strict(element) for element in made["elements"]]
    if "rules" in made:
        made["rules"] = [[trigger, _strict(rest)] for trigger, rest in made["rules"]]
    return made


class Grammars:
    """Compiles grammars for one model's tokenizer.

    `compile` and `forget` may be called from one thread while `begin` is called from the same or another.
    """

    def __init__(self, tokenizer: Path, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._compiler: Any = None
        self._missing = ""
        self._ready: dict[str, Any] = {}

    def load(self) -> str:
        """Load xgrammar and tell it the vocabulary; returns what is in the way. Before the rank serves: importing it
        takes seconds of the interpreter (it brings a hub's client along), which the step loop would stand still for."""
        if self._compiler is not None or self._missing:
            return self._missing
        try:
            import xgrammar

            info = self._tokenizer_info()
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        except ImportError as error:
            self._missing = f"guided decoding needs xgrammar on the engine: {error}"
        except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower; the engine serves, without grammars
            self._missing = f"xgrammar cannot use this model's tokenizer: {error}"
        return self._missing

    def compile(self, grammar: str) -> tuple[str, int]:
        """Compile and keep; returns (what is wrong with it, its size in bytes). Not from two threads at once."""
        missing = self.load()
        if missing:
            return missing, 0
        kind, _, text = grammar.partition(":")
        try:
            if kind == "json_schema":
                compiled = self._compiler.compile_grammar(json_grammar(text, None))
            elif kind == "ebnf":
                compiled = self._compiler.compile_grammar(text)
            elif kind == "structural_tag":
                compiled = self._compiler.compile_structural_tag(strict(text))
            else:
                return f"a grammar of kind {kind[:20]!r}; known are {', '.join(KINDS)}", 0
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            return blame(kind, text, str(error)), 0
        self._ready[grammar] = compiled
        return "", int(compiled.memory_size_bytes)

    def forget(self, grammar: str) -> None:
        """No further row begins with it."""
        self._ready.pop(grammar, None)

    def begin(self, sampling: Sampling, output: list[int]) -> "GrammarState":
        """The state behind `output`. Raises `NotCompiled`."""
        import xgrammar

        compiled = self._ready.get(sampling.grammar)
        if compiled is None:
            raise NotCompiled(f"no grammar of {len(sampling.grammar)} characters was compiled that begins here")
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(sampling.stop_ids) or None)
        state = GrammarState(matcher, sampling.stop_ids, self._vocab)
        for token in output:
            state.add(token)
        return state

    def _tokenizer_info(self) -> Any:
        import tokenizers
        import xgrammar

        tokenizer = tokenizers.Tokenizer.from_file(str(self._tokenizer))
        words = [""] * self._vocab
        for word, index in tokenizer.get_vocab(with_added_tokens=True).items():
            if index < self._vocab:
                words[index] = word
        about = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
        return xgrammar.TokenizerInfo(
            words,
            vocab_type=about["vocab_type"],
            vocab_size=self._vocab,
            add_prefix_space=about["add_prefix_space"],
        )


class CompilerThread:
    """Answers `Compile` with `Compiled`, one after the other, beside the step loop."""

    def __init__(
        self,
        grammars: Grammars | None,
        epoch: int,
        notify: Callable[[Compiled], None],
        fault: Callable[[BaseException], None],
    ) -> None:
        """`grammars`: None where the engine has no tokenizer. `fault` takes what should not have been raised."""
        self._grammars, self._epoch = grammars, epoch
        self._notify, self._fault = notify, fault
        self._texts: dict[int, str] = {}
        self._queue: queue.SimpleQueue[Compile] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)

    def take(self, message: Compile) -> None:
        """Take an order of the leader; never waits. Only from the step loop: orders and rows keep their order."""
        for number in message.drop:
            text = self._texts.pop(number, None)
            if text is not None and self._grammars is not None:
                self._grammars.forget(text)
        if message.number:
            self._texts[message.number] = message.grammar
            self._queue.put(message)
            if self._thread.ident is None:
                self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                message = self._queue.get()
                if message.number not in self._texts:
                    continue  # whoever asked has gone
                error, size = "the engine has no tokenizer to apply a grammar to", 0
                if self._grammars is not None:
                    usual = sys.getswitchinterval()
                    sys.setswitchinterval(SWITCH_S)
                    error, size = self._grammars.compile(message.grammar)
                    sys.setswitchinterval(usual)
                    if message.grammar not in self._texts.copy().values():
                        self._grammars.forget(message.grammar)
                if error:
                    structlog.get_logger().warning("grammar refused", number=message.number, error=error[:200])
                self._notify(Compiled(self._epoch, 0, message.number, error, size))
        except BaseException as error:  # noqa: BLE001 - said to the leader, then the process ends
            self._fault(error)


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, stop_ids: tuple[int, ...], vocab: int) -> None:
        self._matcher, self._stop_ids, self._vocab = matcher, stop_ids, vocab

    def allowed(self, device: torch.device) -> torch.Tensor | None:
        """[vocab] bool: what may come next; None: anything, where the answer is over and has no token to say so."""
        result = torch.zeros(self._vocab, dtype=torch.bool)
        if self._matcher is None or self._matcher.is_terminated():
            result[list(self._stop_ids)] = True
        else:
            words = torch.zeros(1, -(-self._vocab // 32), dtype=torch.int32)
            self._matcher.fill_next_token_bitmask(words, 0)
            bits = (words[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
            result = bits.bool().view(-1)[: self._vocab]
        return result.to(device) if bool(result.any()) else None

    def add(self, token: int) -> None:
        """The next token of the answer. One that the grammar does not admit ends it: only stop tokens remain."""
        if self._matcher is not None and not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            structlog.get_logger().warning("output is not of its grammar", token=token)
            self._matcher = None
