from __future__ import annotations

import pytest

from slotline.batch.failures import FailureLimit


@pytest.mark.parametrize(
    ("text", "ended", "failed", "stops"),
    [
        ("3", 3, 3, False),
        ("3", 4, 4, True),
        ("0", 100, 1, True),
        ("5%", 49, 49, False),
        ("5%", 100, 5, False),
        ("5%", 100, 6, True),
        ("100%", 60, 60, False),
    ],
)
def test_a_limit_stops_beyond_it(text: str, ended: int, failed: int, stops: bool) -> None:
    assert (FailureLimit.parse(text).reason(ended, failed) is not None) is stops


@pytest.mark.parametrize(
    ("ended", "failed", "stops"), [(49, 49, False), (50, 50, True), (50, 49, False), (900, 800, False)]
)
def test_without_a_limit_only_a_run_that_serves_nothing_is_stopped(ended: int, failed: int, stops: bool) -> None:
    assert (FailureLimit().reason(ended, failed) is not None) is stops


def test_the_reason_names_the_numbers() -> None:
    assert FailureLimit.parse("2.5%").reason(100, 4) == (
        "4 of 100 lines have failed, more than --max-failures 2.5% allows"
    )


@pytest.mark.parametrize("text", ["", "-1", "x", "101%", "-1%", "nan%", "inf%", "1.5", "%"])
def test_what_is_neither_a_number_nor_a_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of lines"):
        FailureLimit.parse(text)
