"""The tokens of one job as an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from slotline.errors import StreamGap, StreamTimeout
from slotline.follow import Follower
from slotline.results import Result, Token, outcome
from slotline.sse import SseEvent
from slotline.transport import Transport


class TokenStream(Iterator[Token]):
    """Yields each token of a job once, in order, as it comes.

    It reconnects by itself. Where the server has lost tokens of an ended job, their text comes as one. Leaving it
    early, by `close` or the end of a `with` block, leaves the job running.
    It is used by one thread.

    Attributes:
        job_id: the job.
        result: the whole result, once the last token has been given.
    """

    def __init__(self, transport: Transport, job_id: str, timeout: float | None, after: int = -1) -> None:
        self.job_id = job_id
        self.result: Result | None = None
        self._timeout_s = timeout
        self._clock = transport.clock
        self._follower = Follower(transport, job_id, after)
        # Tokens already seen by the caller prove that the job has started.
        self._started: str | None = "" if after >= 0 else None
        self._over = False
        self._next_index = after + 1
        # The text given so far, to know what is missing after a gap; None if we have not given all of it.
        self._given: str | None = "" if after < 0 else None

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that was left by `break` has nobody else to end the reading.
        if hasattr(self, "_follower"):
            self.close()

    def __next__(self) -> Token:
        """Wait for the next token, at most the time limit counted from now or from the start of the job.

        Raises:
            StopIteration: the job has completed; `result` is there.
            StreamTimeout: no token came in time; the job lives on, and the stream can be read on.
            StreamGap: the server has lost tokens, and we do not know their text; the stream can be read on.
            JobFailed, JobCancelled: it ended that way; the error has the text so far.
        """
        if self._over:
            raise StopIteration
        deadline = self._deadline()
        while True:
            event = self._next(deadline)
            if event.name == "token":
                data = event.json()
                return self._give(Token(data["text"], data["index"], data["token"]))
            if event.name == "gap":
                if rest := self._rest(**event.json()):
                    return self._give(rest)
                continue
            if event.name == "paused":
                # It waits for a slot again.
                self._started = deadline = None
                continue
            if event.name in ("done", "failed"):
                self._finish(event)
                raise StopIteration
            if event.name in ("started", "resumed") and event.data != self._started:
                # The same one again, after a reconnect, would not be news.
                self._started = event.data
                deadline = self._deadline()

    def close(self) -> None:
        """Leave the stream; the job runs on."""
        self._over = True
        self._follower.close()

    def _give(self, token: Token) -> Token:
        self._next_index = token.index + 1
        if self._given is not None:
            self._given += token.text
        return token

    def _rest(self, tokens: int, text: str | None, **_: Any) -> Token | None:
        """What is missing before the index `tokens`, as one token; None if nothing is."""
        if text is not None and self._given is not None and text.startswith(self._given):
            rest = text[len(self._given) :]
            return Token(rest, max(tokens, self._next_index) - 1, None) if rest else None
        if tokens <= self._next_index:
            return None
        lost = f"tokens {self._next_index} to {tokens - 1} of job {self.job_id} are lost; its result has all of them"
        self._given, self._next_index = None, tokens
        raise StreamGap(lost, self.job_id)

    def _deadline(self) -> float | None:
        """Time spent in the queue does not count."""
        if self._timeout_s is None or self._started is None:
            return None
        return self._clock() + self._timeout_s

    def _next(self, deadline: float | None) -> SseEvent:
        try:
            return self._follower.next(deadline)
        except TimeoutError:
            self._follower.close()
            raise StreamTimeout(
                f"no token of job {self.job_id} came within {self._timeout_s:g} s; the job lives on", self.job_id
            ) from None
        except BaseException:
            self.close()
            raise

    def _finish(self, event: SseEvent) -> None:
        self.close()
        self.result = outcome(event.json())
