from __future__ import annotations

import pytest

from slotline.batch.lines import Line, Rules
from slotline.batch.options import check_options
from slotline.batch.problems import BadInput
from slotline.batch.rows import Outcome
from tests.slotline.batch.stand_in import StandIn, refused, served


def refusing(param: str | None) -> StandIn:
    error = {"message": "`x` is wrong", "type": "invalid_request_error", "code": "invalid_request", "param": param}
    return StandIn(lambda line: Outcome(line, None, error, 400))


@pytest.mark.parametrize("param", ["temperature", "response_format.json_schema.schema.a"])
def test_an_option_that_is_refused_is_bad_input(param: str) -> None:
    rules = Rules(options={"temperature": 99, "response_format": {}})
    with pytest.raises(BadInput, match="the options of the command cannot be served: `x` is wrong"):
        check_options(refusing(param), rules)


@pytest.mark.parametrize("param", [None, "prompt", "model"])
def test_what_else_goes_wrong_is_left_to_the_lines(param: str | None) -> None:
    runner = refusing(param)
    check_options(runner, Rules(options={"temperature": 1}))
    assert len(runner.started) == 1


def test_the_probe_is_one_token_long_and_has_the_options() -> None:
    runner = StandIn(served)
    check_options(runner, Rules(options={"temperature": 1, "max_tokens": 4000}))
    (line,) = runner.started
    assert line == Line(0, {}, "/v1/jobs", line.body)
    assert line.body == {"prompt": "a", "temperature": 1, "max_tokens": 1, "priority": "interactive"}


def test_a_limit_of_no_tokens_is_tried_as_it_is() -> None:
    runner = StandIn(served)
    check_options(runner, Rules(options={"max_tokens": -3}))
    assert runner.started[0].body["max_tokens"] == -3


def test_without_options_nothing_is_run() -> None:
    runner = StandIn(refused)
    check_options(runner, Rules(seed=3))
    assert runner.started == []
