from __future__ import annotations

import inspect

import pytest

import slotline
from slotline import errors


def tree() -> list[type[Exception]]:
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
    return [kind for kind in found if kind.__module__ == errors.__name__]


def test_every_error_is_under_one_root_drawn_in_the_docstring_and_importable_from_the_package() -> None:
    for kind in tree():
        assert issubclass(kind, errors.SlotlineClientError)
        assert kind.__name__ in errors.__doc__
        assert getattr(slotline, kind.__name__) is kind


def test_time_outs_and_lost_connections_are_also_what_python_calls_them() -> None:
    assert isinstance(errors.StreamTimeout("late", "job1"), TimeoutError)
    assert isinstance(errors.ConnectionFailed("gone", "http://x"), ConnectionError)
    assert str(errors.ResultTimeout("late", "job1")) == "late"


def test_an_api_error_shows_status_code_and_field() -> None:
    assert str(errors.ApiError("no", 400, "invalid_request", "stop")) == "no (HTTP 400, invalid_request, stop)"
    assert str(errors.ApiError("no", 500)) == "no (HTTP 500, unknown)"


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        slotline.Klient  # noqa: B018
    for name in slotline.__all__:
        assert getattr(slotline, name) is not None


def test_a_plain_rq_worker_is_sent_away() -> None:
    with pytest.raises(RuntimeError, match="must be run by `slotline worker`"):
        slotline.generate({"prompt": "a"})
