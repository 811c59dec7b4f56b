"""From token bytes to text that is certain: no half character, no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


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
