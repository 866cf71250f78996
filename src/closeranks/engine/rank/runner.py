"""Executes a step's copies and rows: keeps the slots, lays out the batch, runs the model, samples, spreads the tokens.

A slot's tokens lie on the device and are written there by the step that samples them, so the next step can be laid
out and started without knowing their values.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from closeranks.protocol import Begin, Row, Sampling, Step, TopLogprobs

from .collectives import Group
from .grammar import Grammars, GrammarState
from .models.batch import make_batch
from .models.llama import Llama
from .planes import Pool
from .sampler import Draw, Drawn, History, needs_history, on_host, sample


class InvalidStep(ValueError):
    """The step asks for what the rank's state does not allow; leader and rank disagree. Ends the epoch."""


@dataclass(frozen=True)
class StepResult:
    """What a step's rows gave."""

    tokens: list[int]
    """One per sampled row, in row order; on every rank."""
    logprobs: list[TopLogprobs | None]
    """Rank 0 only: empty if no row asked, else one per token."""
    forward_us: int


@dataclass
class Slot:
    """One sequence."""

    begin: Begin
    length: int
    """Tokens known, sampled ones included."""
    pages: int
    """Entries of the page table in use."""
    history: History | None = None
    grammar: GrammarState | None = None


@dataclass(frozen=True)
class Pending:
    """A launched step. `result` waits for the device."""

    finish: Callable[[], StepResult]
    event: torch.Event | None = None
    """Comes when the device has done the step and its results lie in host memory; None: it was done in `launch`."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self.event is None or self.event.query()

    def result(self) -> StepResult:
        """Wait for the device. Call once."""
        if self.event is not None:
            self.event.synchronize()
        return self.finish()


class Runner:
    """One rank's executor. Steps are launched in order, from one thread."""

    def __init__(self, model: Llama, pool: Pool, group: Group, max_running: int, tokenizer: Path | None = None) -> None:
        """`tokenizer`: tokenizer.json, needed for grammars only."""
        self.model, self.pool, self.group = model, pool, group
        self.grammars = None if tokenizer is None else Grammars(tokenizer, model.config.vocab)
        # No sequence is longer than all pages together, whatever the model could take: the tables below end there.
        self.context = min(model.config.context_length, pool.num_pages * pool.page_size)
        self.ahead = model.device.type == "cuda"
        """Whether `launch` returns while the device still works."""
        self.slots: list[Slot | None] = [None] * max_running
        # One column more than the context: where the token after the last position is written.
        self.tokens = torch.zeros(max_running, self.context + 1, dtype=torch.int32, device=model.device)
        self.table = np.zeros((max_running, -(-self.context // pool.page_size)), np.int32)

    def page_table(self, slot: int) -> npt.NDArray[np.int32]:
        """Pages of a slot in order, as this rank holds them: a view, valid until the next step."""
        state = self.slots[slot]
        return self.table[slot, : 0 if state is None else state.pages]

    def run(self, step: Step) -> StepResult:
        """Execute the step and wait for its tokens."""
        return self.launch(step).result()

    def warm_up(self, chunk: int) -> None:
        """Run a chunk and a decode row on page 0, so that no request pays for first calls. All ranks together."""
        count = max(1, min(chunk, self.context - 1, self.pool.page_size))
        begin = Begin(sampling=Sampling(), tokens=[0] * count, prompt_length=count, pages=[0])
        self.run(Step(0, 0, rows=[Row(0, 0, count, sample=True, begin=begin)]))
        if count < min(self.context, self.pool.page_size):
            self.run(Step(0, 0, rows=[Row(0, count, 1, sample=True)]))
        self.slots[0] = None
        self.pool.tensor[0] = 0

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Execute copies and rows; on CUDA this returns while the device still works.

        Raises:
            InvalidStep: it says which row asks for what.
        """
        began = time.perf_counter()
        for copy in step.copies:
            if not self.pool.tables_inside((copy.source, copy.target)):
                raise InvalidStep(f"copy of page {copy.source} to {copy.target} of {self.pool.num_pages}")
            self.pool.copy(copy.source, copy.target)
        if not step.rows:
            return Pending(lambda: StepResult([], [], 0), self._event() if step.copies else None)
        slots = [self._admit(row) for row in step.rows]
        drawn, tokens = self._forward(step.rows, slots)
        # Fetched now: a copy that is asked for later would wait for the step that is launched in between.
        values = None if tokens is None else on_host(tokens)
        shown = None if drawn is None else drawn.on_host()
        return Pending(lambda: self._result(began, shown, values), self._event())

    def _event(self) -> torch.Event | None:
        if not self.ahead:
            return None
        event = torch.Event(self.tokens.device)
        event.record(torch.cuda.current_stream(self.tokens.device))
        return event

    def _result(self, began: float, drawn: Drawn | None, tokens: torch.Tensor | None) -> StepResult:
        values = [] if tokens is None else tokens.tolist()
        if drawn is not None:
            drawn.check()
        logprobs = [] if drawn is None else drawn.logprobs()
        return StepResult(values, logprobs, int((time.perf_counter() - began) * 1e6))

    def _admit(self, row: Row) -> Slot:
        """Begin the row's slot if it says so, extend its page table, and check that it can be computed."""
        if not 0 <= row.slot < len(self.slots):
            raise InvalidStep(f"slot {row.slot} of {len(self.slots)}")
        if row.begin is not None:
            self.slots[row.slot] = self._begun(row.slot, row.begin)
        slot = self.slots[row.slot]
        if slot is None:
            raise InvalidStep(f"slot {row.slot} was never begun")
        self._append(row.slot, slot, row.pages)
        end = row.start + row.count
        if row.count < 1 or row.start < 0 or end > slot.length or end > self.context:
            raise InvalidStep(
                f"slot {row.slot}: positions {row.start} .. {end - 1} of {slot.length} known tokens, "
                f"context {self.context}"
            )
        if end > slot.pages * self.pool.page_size:
            raise InvalidStep(f"slot {row.slot}: position {end - 1} lies beyond its {slot.pages} pages")
        if row.sample and end != slot.length:
            raise InvalidStep(f"slot {row.slot}: samples after position {end - 1}, but knows {slot.length} tokens")
        return slot

    def _begun(self, number: int, begin: Begin) -> Slot:
        tokens = np.asarray(begin.tokens, np.int64)
        vocab = self.model.config.vocab
        if not 0 < len(tokens) <= self.context:
            raise InvalidStep(f"slot {number} begins with {len(tokens)} tokens, context {self.context}")
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise InvalidStep(f"slot {number} begins with a token outside of the vocabulary of {vocab}")
        on_device = torch.from_numpy(tokens).to(self.tokens.device)
        self.tokens[number, : len(tokens)] = on_device
        slot = Slot(begin=begin, length=len(tokens), pages=0)
        if self.group.rank == 0 and needs_history(begin.sampling):
            slot.history = History(on_device, begin.prompt_length, vocab)
        if self.group.rank == 0 and begin.sampling.grammar:
            if self.grammars is None:
                raise InvalidStep(f"slot {number} has a grammar, and this engine has no tokenizer to apply it")
            slot.grammar = self.grammars.begin(begin.sampling, begin.tokens[begin.prompt_length :])
        self._append(number, slot, begin.pages)
        return slot

    def _append(self, number: int, slot: Slot, pages: list[int]) -> None:
        if not pages:
            return
        if not self.pool.tables_inside(pages):
            raise InvalidStep(f"slot {number}: pages {pages} of {self.pool.num_pages}")
        if slot.pages + len(pages) > self.table.shape[1]:
            raise InvalidStep(f"slot {number}: {slot.pages + len(pages)} pages for a context of {self.context} tokens")
        self.table[number, slot.pages : slot.pages + len(pages)] = pages
        slot.pages += len(pages)

    def _forward(self, rows: list[Row], slots: list[Slot]) -> tuple[Drawn | None, torch.Tensor | None]:
        """One pass over all rows; returns (draws on rank 0, sampled tokens on every rank)."""
        numbers = np.asarray([r.slot for r in rows])
        if len(set(numbers.tolist())) != len(rows):
            raise InvalidStep(f"a slot has two rows in one step: {numbers.tolist()}")
        starts = np.asarray([r.start for r in rows], np.int32)
        counts = np.asarray([r.count for r in rows], np.int32)
        width = -(-int((starts + counts).max()) // self.pool.page_size)
        cells = np.concatenate([np.arange(r.count) + (r.slot * self.tokens.shape[1] + r.start) for r in rows])
        fed = self.tokens.view(-1)[torch.from_numpy(cells).to(self.tokens.device)]
        sampled = [i for i, r in enumerate(rows) if r.sample]
        batch = make_batch(starts, counts, self.table[numbers, :width], self.pool.page_size, fed, sampled)
        logits = self.model.forward(batch, self.pool.tensor, self.group)
        if logits is None:
            return None, None
        parts = self.group.gather(logits)
        drawn: Drawn | None = None
        tokens = torch.empty(len(sampled), dtype=torch.int64, device=self.tokens.device)
        if parts is not None:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
            drawn = sample(whole, [self._draw(slots[i]) for i in sampled])
            tokens = drawn.tokens
            for at, i in enumerate(sampled):
                state = slots[i].grammar
                if state is not None:  # the one kind of row whose value the host must know at once
                    state.add(int(tokens[at]))
        self.group.broadcast(tokens)
        ends = np.asarray([rows[i].slot * self.tokens.shape[1] + slots[i].length for i in sampled])
        self.tokens.view(-1)[torch.from_numpy(ends).to(tokens.device)] = tokens.int()
        for i in sampled:
            slots[i].length += 1
        return drawn, tokens

    def _draw(self, slot: Slot) -> Draw:
        allowed = None if slot.grammar is None else slot.grammar.allowed(self.tokens.device)
        return Draw(sampling=slot.begin.sampling, position=slot.length, history=slot.history, allowed=allowed)
