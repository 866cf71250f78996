"""Parameters and their values, and markers that end more than one level."""

from closeranks.codec.blocks import Blocks
from closeranks.codec.lexicon import Kind, Marker
from closeranks.codec.machine import TRANSITIONS, Action, State


class Values(Blocks):
    """The states STRING, JSON, BODY and ENVELOPE."""

    def _do_open_parameter(self, marker: Marker) -> None:
        self._open_value(marker, marker.string)

    def _do_bad_parameter(self, marker: Marker) -> None:
        if marker.kind is Kind.PARAM_ODD:
            self._open_value(marker, None)
            return
        self._junk = False
        self._calls.abort("malformed_parameter", self._tag(marker))

    def _do_orphan_parameter(self, marker: Marker) -> None:
        """A parameter without an invoke: there is no name to call."""
        self._do_bad_invoke(marker)
        self._orphan = not self._wrapped
        if marker.kind is not Kind.PARAM_BAD:
            self._state = State.STRING

    def _open_value(self, marker: Marker, string: bool | None) -> None:
        self._junk = False
        as_text = self._calls.parameter(marker.name, string, self._tag(marker))
        self._state = State.STRING if as_text else State.JSON

    def _step_value(self, final: bool) -> bool:
        buffer, at = self._buffer, self._at
        found = self._lexicon.value_head[self._family].search(buffer, at)
        if found is None:
            stop = self._begun_from(self._lexicon.value_begun[self._family], at)
            if final:
                self._value(buffer[at:stop])
                self._discard(buffer[stop:], "cut")
                self._at = len(buffer)
                return False
            self._at = self._value_up_to(at, stop)
            return False
        self._at = self._value_up_to(at, found.start())
        if not final and self._lexicon.may_grow(buffer, found):
            return False
        marker = self._lexicon.read_tag(buffer, found, final)
        if marker is None:
            return False
        self._newline = buffer[self._at : found.start()]
        if TRANSITIONS[self._state][marker.kind] is Action.LITERAL:
            self._value(self._newline + buffer[found.start() : found.end()])
            self._at = found.end()
            return True
        self._at = marker.end
        self._act(marker)
        return True

    def _value_up_to(self, at: int, stop: int) -> int:
        """Pass on `buffer[at:stop]`, less a last newline, which is framing if the parameter is never closed."""
        if stop > at and self._state is State.STRING and self._buffer[stop - 1] == "\n":
            stop -= 1
        self._value(self._buffer[at:stop])
        return stop

    def _value(self, text: str) -> None:
        if not text:
            return
        text = self._lexicon.show(text)
        if self._state is State.STRING:
            self._calls.text(text)
        elif self._state is State.ENVELOPE:
            self._calls.body(text)
        else:
            self._calls.json(text)

    def _end_value(self) -> None:
        if self._state is State.JSON:
            self._calls.end_json()
        else:
            self._calls.end_text()
        self._state = State.INVOKE
        self._junk = False

    def _do_close_parameter(self, marker: Marker) -> None:
        self._value(self._newline)
        if not self._calls.live:
            self._calls.discard(self._tag(marker))
        self._end_value()

    def _do_commit_unclosed(self, marker: Marker) -> None:
        if self.policy.unclosed_parameter == "accept":
            self._end_value()
        else:
            self._calls.abort("malformed_parameter", "")
            self._state = State.INVOKE
        self._do_commit(marker)

    def _do_bad_closer(self, marker: Marker) -> None:
        self._calls.abort("malformed_parameter", self._tag(marker))
        self._state = State.INVOKE
        self._junk = False

    def _do_nested(self, marker: Marker) -> None:
        self._calls.abort("malformed_parameter", self._tag(marker))
        self._state = State.INVOKE if marker.kind is Kind.PARAM_BAD else State.STRING

    def _break(self) -> None:
        self._calls.abort("unclosed_call", "")
        self._calls.commit()
        self._junk = False

    def _do_break_to_block(self, marker: Marker) -> None:
        self._break()
        self._discard(self._tag(marker), "stray_markup", "block")
        self._wrapped = True
        self._state = State.BLOCK

    def _do_break_to_invoke(self, marker: Marker) -> None:
        self._break()
        self._do_open_invoke(marker)

    def _do_break_to_empty(self, marker: Marker) -> None:
        self._break()
        self._do_empty_invoke(marker)

    def _do_break_and_close(self, marker: Marker) -> None:
        self._break()
        self._leave()
