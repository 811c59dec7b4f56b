"""Many prompts through a server: lazily, a bounded number at once, results in the order of the prompts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from slotline.calls import Answer, Calls
from slotline.errors import SlotlineClientError
from slotline.results import Result, outcome

#: How long to go on without a server that is well.
PATIENCE_S = 60.0


def map_jobs(
    url: str, items: Iterable[Any], body_of: Callable[[Any], dict[str, Any]], window: int, return_errors: bool
) -> Generator[Result | SlotlineClientError, None, None]:
    """See `Client.map`. `body_of` makes the body of a job of an item.

    Raises:
        TypeError: `items` is one prompt or job rather than an iterable of them.
    """
    if isinstance(items, str | bytes | Mapping):
        raise TypeError("`items` is a single prompt or job: put it into a list")
    return _results(url, iter(items), body_of, window, return_errors)


def _results(
    url: str, source: Iterator[Any], body_of: Callable[[Any], dict[str, Any]], window: int, return_errors: bool
) -> Generator[Result | SlotlineClientError, None, None]:
    answers: dict[int, Answer] = {}
    sent = given = 0
    is_open = True
    calls = Calls(url, PATIENCE_S)
    try:
        while True:
            while is_open and sent - given < window:
                try:
                    item = next(source)
                except StopIteration:
                    is_open = False
                    break
                calls.run_job(sent, {"id": uuid.uuid4().hex, **body_of(item)})
                sent += 1
            if given == sent:
                return
            while given not in answers:
                answers.update((answer.key, answer) for answer in calls.ended(None))
            yield _result(answers.pop(given), return_errors)
            given += 1
    finally:
        calls.close()


def _result(answer: Answer, return_errors: bool) -> Result | SlotlineClientError:
    try:
        if answer.error is not None:
            raise answer.error
        assert answer.body is not None
        return outcome(answer.body)
    except SlotlineClientError as error:
        if not return_errors:
            raise
        return error
