from __future__ import annotations

import pytest

from shared.errors import InvalidRequest
from slotline.batch.embedded import _requests
from slotline.batch.lines import JOBS, Line


def line(**body: object) -> Line:
    return Line(1, {}, JOBS, {"prompt": "hello", **body})


def test_a_line_becomes_a_job_of_the_lowest_priority() -> None:
    _, (job,) = _requests(line())
    assert (job.prompt, job.priority) == ("hello", "batch")


def test_a_webhook_that_nobody_would_send_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs a server"):
        _requests(line(webhook_url="https://example.com/hook"))
