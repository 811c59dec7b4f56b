from __future__ import annotations

import json

from slotline.batch.lines import Line, content_hash
from slotline.batch.rows import Outcome, encode, given_back, own_part, row_of
from tests.slotline.batch.stand_in import refused, served

PLAIN = Line(3, {"prompt": "hi", "id": 7}, "/v1/jobs", {"prompt": "hi"})
OPENAI = Line(3, {}, "/v1/chat/completions", {}, custom_id="a")


def test_a_plain_row_is_the_lines_own_fields_and_ours() -> None:
    assert row_of(served(PLAIN), "run") == {
        "prompt": "hi",
        "id": 7,
        "line": 3,
        "text": "hi",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 0},
        "error": None,
    }


def test_a_failed_plain_row_has_the_error_and_nothing_else_of_ours() -> None:
    row = row_of(refused(PLAIN), "run")
    assert row["error"]["code"] == "too_long"
    assert (row["text"], row["finish_reason"], row["usage"]) == (None, None, None)


def test_what_only_some_answers_have_is_only_in_their_rows() -> None:
    job = {"text": "a", "reasoning_content": "because", "tool_calls": None}
    row = row_of(Outcome(PLAIN, job), "run")
    assert row["reasoning_content"] == "because"
    assert "tool_calls" not in row


def test_a_field_with_one_of_our_names_is_given_back_under_another() -> None:
    fields = {"text": "a", "input_text": "b", "line": 1, "id": 2, "input_error": 4}
    assert given_back(fields) == {
        "input_input_text": "a",
        "input_text": "b",
        "input_line": 1,
        "id": 2,
        "input_error": 4,
    }


def test_the_own_part_of_a_row_is_what_was_given_back() -> None:
    fields = {"text": "a", "n": 1.5, "é": None, "line": 9, "deep": {"x": [1, "\u2028"]}}
    line = Line(3, fields, "/v1/jobs", {"prompt": "hi"})
    row = json.loads(encode(row_of(served(line), "run")))
    assert content_hash(own_part(row)) == content_hash(given_back(fields))


def test_an_openai_row_has_the_answer_as_its_response() -> None:
    answer = {"id": "chatcmpl-1", "choices": []}
    row = row_of(Outcome(OPENAI, answer, request_id="r1"), "run")
    response = {"status_code": 200, "request_id": "r1", "body": answer}
    assert row == {"id": "batch_req_run_3", "custom_id": "a", "response": response, "error": None}


def test_a_failed_openai_row_has_its_status_and_the_error_as_its_body() -> None:
    row = row_of(refused(OPENAI), "run")
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"]["error"]["code"] == "too_long"
    assert row["error"] is None


def test_an_answer_is_cut_when_it_or_a_choice_ended_at_its_length() -> None:
    assert Outcome(PLAIN, {"finish_reason": "length"}).cut
    assert Outcome(OPENAI, {"choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}).cut
    assert not served(PLAIN).cut
    assert not refused(PLAIN).cut


def test_a_row_is_one_line_whatever_it_holds() -> None:
    data = encode({"text": "a\nb\u2028c\r"})
    assert data.count(b"\n") == 1
    assert json.loads(data) == {"text": "a\nb\u2028c\r"}
