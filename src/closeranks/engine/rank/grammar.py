"""Grammars on the sampling rank: which tokens may come next. A function of the grammar and of the output so far.

A grammar that cannot be compiled, or output that it does not admit, ends that answer: only its stop tokens remain. It
must not end the epoch, which others share; the gateway should have refused it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from closeranks.protocol import Sampling

T = TypeVar("T")

KINDS = ("json_schema", "ebnf", "structural_tag")
PATIENCE_S = 60.0
"""Loading xgrammar and compiling a grammar may take this long, while the step goes on being reported as alive."""
TICK_S = 0.5
CACHE_BYTES = 256 * 2**20
"""Of compiled grammars, so that schemas without end take no memory without end."""


class GrammarTimeout(RuntimeError):
    """A grammar took longer than `PATIENCE_S`. Ends the epoch: the compiler cannot be stopped from outside."""


class Grammars:
    """Compiles grammars for one model's tokenizer; xgrammar is loaded at the first use."""

    def __init__(self, tokenizer: Path, vocab: int, tick: Callable[[], None]) -> None:
        """`tick` is called while a grammar is compiled."""
        self._tokenizer, self._vocab, self._tick = tokenizer, vocab, tick
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._compiler: Any = None

    def begin(self, sampling: Sampling, output: list[int]) -> "GrammarState":
        """The state behind `output`. Raises `GrammarTimeout`."""
        state = GrammarState(self._alive(lambda: self._matcher(sampling)), sampling.stop_ids, self._vocab)
        for token in output:
            state.add(token)
        return state

    def _alive(self, work: Callable[[], T]) -> T:
        future = self._thread.submit(work)
        for _ in range(int(PATIENCE_S / TICK_S)):
            try:
                return future.result(timeout=TICK_S)
            except TimeoutError:
                self._tick()
        raise GrammarTimeout(f"a grammar was not compiled within {PATIENCE_S:.0f} s")

    def _matcher(self, sampling: Sampling) -> Any:
        """A matcher, or None for a grammar that is none."""
        import xgrammar

        if self._compiler is None:
            info = self._tokenizer_info()
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        kind, _, text = sampling.grammar.partition(":")
        try:
            if kind == "json_schema":
                compiled = self._compiler.compile_json_schema(text)
            elif kind == "ebnf":
                compiled = self._compiler.compile_grammar(text)
            elif kind == "structural_tag":
                compiled = self._compiler.compile_structural_tag(text)
            else:
                raise ValueError(f"kind {kind[:20]!r}, known are {', '.join(KINDS)}")
            return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(sampling.stop_ids) or None)
        except (RuntimeError, ValueError, TypeError) as error:
            structlog.get_logger().warning("grammar refused", error=str(error).splitlines()[0][:200])
            return None

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
        """The next token of the answer."""
        if self._matcher is not None and not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            self._matcher = None
