"""From tokens to text that is certain: no half character, no part of a stop string, no half mark of a format."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from worker.answer import AnswerFormat, AnswerReader, Delta, ToolCall
from worker.backend import Vocabulary


class TextAssembler:
    """Builds the text of one answer, token by token.

    A character is given out once it is complete, and text that could be the start of a stop string once it is
    certain not to be. Bytes that are no UTF-8 become U+FFFD; loose bytes at the end become one of them.
    """

    __slots__ = ("_decoder", "_held", "_longest", "_parts", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._parts)

    def push(self, piece: bytes) -> str:
        """Add the bytes of a token and return the text that is certain now, which may be empty.

        `stopped` is set once a stop string has come up; neither it nor anything after it is given out.
        """
        return self._take(self._decoder.decode(piece), final=False)

    def finish(self) -> str:
        """End the answer and return what was still held back."""
        return self._take(self._decoder.decode(b"", final=True), final=True)

    def _take(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            ready = new
        else:
            text = self._held + new
            cut = self._first_stop(text)
            if cut is not None:
                self.stopped = True
                ready, self._held = text[:cut], ""
            else:
                keep = 0 if final else self._possible_start(text)
                ready, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if ready:
            self._parts.append(ready)
        return ready

    def _first_stop(self, text: str) -> int | None:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class Transcript:
    """What the tokens of one answer say, where all of it is text.

    `stopped` is set once a stop string has come up.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        self.stopped = False
        self._piece = piece
        self._assembler = TextAssembler(stops)

    @property
    def text(self) -> str:
        """The text given out so far."""
        return self._assembler.text

    @property
    def reasoning(self) -> str | None:
        """The reasoning given out so far; None where there is none."""
        return None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls as far as they have come."""
        return ()

    def push(self, token: int) -> tuple[str, Delta | None]:
        """Add a token; returns the text that is certain now, and all that is where there is more than text."""
        text = self._assembler.push(self._piece(token))
        self.stopped = self._assembler.stopped
        return text, None

    def finish(self) -> tuple[str, Delta | None]:
        """End the answer; returns what was still held back, as `push` does."""
        return self._assembler.finish(), None


class FormattedTranscript(Transcript):
    """What the tokens of one answer say, taken apart by a format.

    Stop strings apply to what the model writes, marks included, before it is taken apart.
    """

    def __init__(self, vocab: Vocabulary, stops: Sequence[str], format: AnswerFormat) -> None:
        super().__init__(lambda token: format.piece(token, vocab), stops)
        self._reader = AnswerReader(format)

    @property
    def text(self) -> str:
        """See `Transcript`."""
        return self._reader.text

    @property
    def reasoning(self) -> str | None:
        """See `Transcript`."""
        return self._reader.reasoning or None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """See `Transcript`."""
        return tuple(self._reader.tool_calls)

    def push(self, token: int) -> tuple[str, Delta | None]:
        """See `Transcript`."""
        delta = self._reader.push(super().push(token)[0])
        return delta.text, delta

    def finish(self) -> tuple[str, Delta | None]:
        """See `Transcript`."""
        rest, last = self._reader.push(self._assembler.finish()), self._reader.finish()
        delta = Delta(rest.text + last.text, rest.reasoning + last.reasoning, rest.tool_calls + last.tool_calls)
        return delta.text, delta


def transcript_of(
    vocab: Vocabulary, stops: Sequence[str], format: AnswerFormat | None, tokens: Sequence[int] = ()
) -> Transcript:
    """The transcript of an answer that has come to `tokens`."""
    made = Transcript(vocab.piece, stops) if format is None else FormattedTranscript(vocab, stops, format)
    for token in tokens:
        made.push(token)
    return made
