"""Taking an answer apart while it is made: text, reasoning, tool calls.

Whitespace at both ends of the reasoning is dropped, and so is what stands between reasoning, text and tool calls.
Sources: what llama.cpp's and vLLM's parsers of reasoning and tool calls drop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from worker.backend import Vocabulary
from worker.tool_calls import CallPiece, CallReader
from worker.tools import ToolSyntax


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes what is not text.

    `reasoning` is the pair of marks around its reasoning; `reasoning_open` says that the prompt has written the
    first of them already. `functions` are the names of the tools it was given. `call_id` begins the ids of its tool
    calls, so that a resumed request makes the same ones. `marks` spells the marks that are control tokens.
    """

    reasoning: tuple[str, str] | None = None
    reasoning_open: bool = False
    tools: ToolSyntax | None = None
    functions: frozenset[str] = frozenset()
    call_id: str = ""
    marks: Mapping[int, bytes] = field(default_factory=dict)

    def piece(self, token: int, vocab: Vocabulary) -> bytes:
        """The bytes of a token of the answer: as `Vocabulary.piece`, but a mark is spelt out."""
        mark = self.marks.get(token)
        return vocab.piece(token) if mark is None else mark


def marks_of(vocab: Vocabulary, spellings: tuple[str, ...]) -> dict[int, bytes]:
    """Those of the marks that are control tokens, whose `Vocabulary.piece` would be empty, with their spelling."""
    controls = vocab.control_texts()
    return {
        vocab.tokenize(spelling, parse_special=True)[0]: spelling.encode()
        for spelling in spellings
        if spelling in controls
    }


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of tool call `index`: first its id and name, then bits of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of an answer adds."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()


@dataclass(slots=True)
class ToolCall:
    """A tool call as far as it has come; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


class AnswerReader:
    """Reads one answer. `push` takes text that is certain, `finish` ends the answer.

    Nothing is lost but the dropped whitespace and the marks: what looks like a tool call and turns out to be none
    is text, reasoning that never ends stays reasoning, and a call that was cut off stays as far as it came.
    """

    def __init__(self, format: AnswerFormat) -> None:
        self.format = format
        self.tool_calls: list[ToolCall] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._buffer = ""
        self._final = False
        self._drop_space = False
        self._calls: CallReader | None = None
        self._opening = ""
        self._delta = _DeltaBuilder()
        self._step: Callable[[], bool] = self._start if format.reasoning else self._answer

    @property
    def text(self) -> str:
        """The answer proper, so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def push(self, text: str) -> Delta:
        """Take the next piece of the answer."""
        self._buffer += text
        while self._step():
            pass
        return self._delta.take()

    def finish(self) -> Delta:
        """End the answer; returns what was held back."""
        self._final = True
        return self.push("")

    # --- steps: each takes what it can from the buffer and returns whether another one goes on ---

    def _start(self) -> bool:
        assert self.format.reasoning is not None
        mark = self.format.reasoning[0]
        begun = self._buffer.lstrip()
        if begun.startswith(mark):
            return self._enter_thinking(begun[len(mark) :])
        if mark.startswith(begun) and not self._final:
            return False
        if self.format.reasoning_open:
            return self._enter_thinking(begun)
        self._step = self._answer
        return True

    def _enter_thinking(self, rest: str) -> bool:
        self._buffer, self._drop_space, self._step = rest, True, self._think
        return True

    def _think(self) -> bool:
        assert self.format.reasoning is not None
        mark = self.format.reasoning[1]
        if not self._dropped_space():
            return False
        at = self._buffer.find(mark)
        if at < 0:
            self._give_reasoning(self._certain(mark))
            return False
        rest = self._buffer[at + len(mark) :]
        self._give_reasoning(self._buffer[:at].rstrip())
        self._buffer, self._drop_space, self._step = rest, True, self._answer
        return True

    def _answer(self) -> bool:
        syntax = self.format.tools
        if not self._dropped_space():
            return False
        if syntax is None:
            self._step = self._plain
            return True
        if syntax.form == "bare":
            return self._maybe_bare_call(syntax)
        at = self._buffer.find(syntax.begin)
        if at < 0:
            self._give_text(len(self._certain(syntax.begin)))
            return False
        self._give_text(len(self._buffer[:at].rstrip()))
        return self._open_calls(syntax, syntax.begin)

    def _maybe_bare_call(self, syntax: ToolSyntax) -> bool:
        """Such a call is the whole answer, so only its beginning is looked at."""
        begun = self._buffer.lstrip()
        if begun.startswith(syntax.begin):
            return self._open_calls(syntax, syntax.begin)
        if begun.startswith("{"):
            return self._open_calls(syntax, "")
        if syntax.begin.startswith(begun) and not self._final:
            return False
        self._step = self._plain
        return True

    def _plain(self) -> bool:
        self._give_text(len(self._buffer))
        return False

    def _open_calls(self, syntax: ToolSyntax, mark: str) -> bool:
        """Go on with calls; the buffer begins with whitespace and the mark, kept in case that there is no call."""
        end = len(self._buffer) - len(self._buffer.lstrip()) + len(mark)
        self._opening, self._buffer = self._buffer[:end], self._buffer[end:]
        self._calls, self._step = CallReader(syntax, self.format.functions), self._call
        return True

    def _call(self) -> bool:
        assert self._calls is not None
        for piece in self._calls.push(self._buffer):
            self._give_call(piece)
        self._buffer = ""
        if self._final:
            self._calls.finish()
        if not self._calls.over:
            return False
        syntax, started = self.format.tools, self._calls.started
        self._buffer = self._calls.rest if started else self._opening + self._calls.rest
        self._drop_space = started
        self._step = self._plain if syntax is not None and syntax.form == "bare" else self._answer
        if not started:
            self._give_text(len(self._opening))
        return True

    # --- what is given out ---

    def _dropped_space(self) -> bool:
        """Drop leading whitespace where it is to be dropped; returns whether anything is left to look at."""
        if self._drop_space:
            self._buffer = self._buffer.lstrip()
            self._drop_space = not self._buffer
        return bool(self._buffer)

    def _certain(self, mark: str) -> str:
        """The part of the buffer that is neither a possible start of the mark nor whitespace before it."""
        if self._final:
            return self._buffer
        longest = min(len(mark) - 1, len(self._buffer))
        held = next((n for n in range(longest, 0, -1) if mark.startswith(self._buffer[-n:])), 0)
        return self._buffer[: len(self._buffer) - held].rstrip()

    def _give_text(self, size: int) -> None:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if text:
            self._text.append(text)
            self._delta.text += text

    def _give_reasoning(self, text: str) -> None:
        self._buffer = self._buffer[len(text) :]
        if text:
            self._reasoning.append(text)
            self._delta.reasoning += text

    def _give_call(self, piece: CallPiece) -> None:
        if piece.name is not None:
            index = len(self.tool_calls)
            call = ToolCall(f"{self.format.call_id}_{index}", piece.name)
            self.tool_calls.append(call)
            self._delta.calls.append(CallDelta(index, call.id, call.name))
        if piece.arguments:
            self.tool_calls[-1].arguments += piece.arguments
            self._delta.calls.append(CallDelta(len(self.tool_calls) - 1, arguments=piece.arguments))


@dataclass(slots=True)
class _DeltaBuilder:
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def take(self) -> Delta:
        """What has come together since the last time."""
        delta = Delta(self.text, self.reasoning, tuple(self.calls))
        self.text, self.reasoning, self.calls = "", "", []
        return delta
