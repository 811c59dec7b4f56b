from __future__ import annotations

import re

import pytest

from shared import errors
from shared.errors import KINDS, InternalError, JobNotFound, QueueFull, SlotlineError, from_dict, leaves

CLASSES = [cls for cls in leaves() if cls.__module__ == errors.__name__]


def drawn() -> list[tuple[str, int]]:
    """Names and depths of the tree in the module's docstring, from the top."""
    lines = re.findall(r"^ {4}((?:[│├└─ ]{4})*)(\w+)", errors.__doc__ or "", re.MULTILINE)
    return [(name, len(branch) // 4) for branch, name in lines]


def real(cls: type[SlotlineError] = SlotlineError, depth: int = 0) -> list[tuple[str, int]]:
    children = [c for c in cls.__subclasses__() if c.__module__ == errors.__name__]
    return [(cls.__name__, depth), *(line for child in children for line in real(child, depth + 1))]


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    assert len(drawn()) > 20
    assert drawn() == real()


def test_every_code_is_given_once() -> None:
    codes = [cls.code for cls in [SlotlineError, *CLASSES]]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_says_its_own_code_and_what_it_means(cls: type[SlotlineError]) -> None:
    assert "code" in vars(cls)
    assert re.fullmatch(r"[a-z_]+", cls.code)
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_crosses_a_process_as_a_dictionary(cls: type[SlotlineError]) -> None:
    sent = {"message": "what happened", "type": cls.kind(), "code": cls.code, "param": "prompt"}
    rebuilt = from_dict(sent)
    assert type(rebuilt) is cls
    assert str(rebuilt) == "what happened"
    assert rebuilt.to_dict() == sent


def test_the_errors_that_make_their_own_message_cross_a_process_too() -> None:
    for error in (JobNotFound("j1"), QueueFull("full", retry_after_s=9)):
        rebuilt = from_dict(error.to_dict())
        assert type(rebuilt) is type(error)
        assert rebuilt.to_dict() == error.to_dict()
    full = from_dict(QueueFull("full").to_dict())
    assert isinstance(full, QueueFull)
    assert full.retry_after_s > 0


@pytest.mark.parametrize("sent", [{}, {"message": "m", "code": "from_the_future"}, {"message": "m", "code": None}])
def test_an_unknown_code_becomes_an_internal_error_with_the_message(sent: dict[str, str]) -> None:
    rebuilt = from_dict(sent)
    assert type(rebuilt) is InternalError
    assert rebuilt.message == sent.get("message", "")


def test_the_kind_is_the_branch_below_the_root() -> None:
    branch = ""
    for name, depth in drawn()[1:]:
        branch = name if depth == 1 else branch
        assert getattr(errors, name).kind() == KINDS[branch], name


def test_each_branch_has_a_kind_of_its_own() -> None:
    branches = [name for name, depth in drawn() if depth == 1]
    assert sorted(KINDS) == sorted(branches)
    assert len(set(KINDS.values())) == len(KINDS)


def test_only_what_may_pass_is_tried_again() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retryable} == {"DecodeFailed", "InternalError"}


def test_a_missing_job_is_named() -> None:
    error = JobNotFound("j1")
    assert "'j1'" in str(error)
    assert error.param == "id"
