from __future__ import annotations

from typing import Any

import pytest

from shared.ask import Question
from shared.errors import ChatTemplateError, ContextLengthExceeded, InvalidGrammar, InvalidRequest
from shared.settings import WorkerSettings, load
from worker.fake_backend import FakeBackend
from worker.intake import Intake


def intake(**settings: Any) -> Intake:
    made = load(WorkerSettings, {"model_path": "fake:echo", "n_ctx": 100, "n_parallel": 2, **settings})
    backend = FakeBackend.from_settings(made)
    return Intake(made, backend.info, backend.vocab)


def question(kind: Any, body: dict[str, Any]) -> Question:
    return Question("q", kind, body, deadline=0.0)


def test_the_request_overrides_the_workers_defaults() -> None:
    made = intake(temp=0.3, top_k=7, seed=5, penalty_repeat=1.1)
    assert made.prepare({"prompt": "x"}).params.temperature == 0.3
    assert made.prepare({"prompt": "x"}).params.seed == 5
    params = made.prepare({"prompt": "x", "temp": 0, "top_k": 0, "seed": 0, "penalty_repeat": 1}).params
    assert (params.temperature, params.top_k, params.seed, params.repeat_penalty) == (0, 0, 0, 1)


def test_a_missing_seed_differs_between_jobs_and_not_between_attempts_of_one() -> None:
    made = intake()
    seeds = {made.prepare({"prompt": "x"}, seed_source=f"job {i}").params.seed for i in range(20)}
    assert len(seeds) == 20
    assert (
        made.prepare({"prompt": "x"}, "job 1").params.seed
        == made.prepare({"prompt": "x", "seed": -1}, "job 1").params.seed
    )


def test_max_tokens_left_out_is_the_default_or_the_room_left() -> None:
    assert intake(n_ctx=1000).prepare({"prompt": "four"}).max_tokens == 256
    assert intake().prepare({"prompt": "four"}).max_tokens == 96
    assert intake(max_tokens=10).prepare({"prompt": "four"}).max_tokens == 10
    assert intake(max_tokens_cap=5).prepare({"prompt": "four"}).max_tokens == 5


@pytest.mark.parametrize(
    ("payload", "numbers"),
    [
        ({"prompt": "p" * 100}, ("100",)),
        ({"prompt": "p" * 250}, ("250", "100")),
        ({"prompt": "p" * 50, "max_tokens": 51}, ("50", "51", "100")),
        ({"prompt": "p", "max_tokens": 10**9}, ("1000000000", "100")),
    ],
)
def test_what_never_fits_is_refused_with_the_numbers(payload: dict[str, Any], numbers: tuple[str, ...]) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        intake().prepare(payload)
    assert all(number in caught.value.message for number in numbers)


def test_what_fits_exactly_is_accepted() -> None:
    assert intake().prepare({"prompt": "p" * 50, "max_tokens": 50}).max_tokens == 50


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"prompt": "x", "nonsense": 1}, "nonsense"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"prompt": "x", "logit_bias": {"99999": 1.0}}, "logit_bias"),
        ({"prompt": "x", "max_tokens": 9}, "max_tokens"),
    ],
)
def test_bad_payloads_are_refused_by_field(payload: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        intake(max_tokens_cap=8).prepare(payload)
    assert caught.value.param is not None and caught.value.param.startswith(param)


def test_a_zero_character_cuts_nothing_off() -> None:
    assert len(intake().prepare({"prompt": "say A\x00 then say B"}).prompt) == len("say A\x00 then say B")


def test_token_ids_are_taken_as_they_are() -> None:
    assert intake().prepare({"prompt": [1, 2, 3]}).prompt == (1, 2, 3)


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    with pytest.raises(InvalidGrammar):
        intake().prepare({"prompt": "x", "grammar": "root ::= ("})


def test_messages_without_a_template_name_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    made = intake()
    made.template = None
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        made.prepare({"messages": [{"role": "user", "content": "x"}]})


def test_the_workers_file_replaces_the_models_template(tmp_path: Any) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    made = intake(chat_template=tmp_path / "t.jinja")
    assert bytes(made.prepare({"messages": [{"role": "user", "content": "hi"}]}).prompt) == b"hi!"


def test_cache_prompt_follows_the_worker_unless_the_request_says() -> None:
    for switch in (True, False):
        made = intake(cache_prompt=switch)
        assert made.request(made.prepare({"prompt": "x"}), "j", "e").cache_prompt is switch
        assert (
            made.request(made.prepare({"prompt": "x", "cache_prompt": not switch}), "j", "e").cache_prompt is not switch
        )


def test_questions_are_answered_and_refused_like_requests() -> None:
    made = intake()
    assert made.answer(question("check", {"request": {"prompt": "four"}})) == {"prompt_tokens": 4}
    assert made.answer(question("tokenize", {"content": "hi"})) == {"tokens": [104, 105]}
    assert made.answer(question("detokenize", {"tokens": [104, 105]})) == {"content": "hi"}
    assert made.answer(question("detokenize", {"tokens": [10**6]}))["error"]["param"] == "tokens"
    assert (
        made.answer(question("check", {"request": {"prompt": "p" * 200}}))["error"]["code"] == "context_length_exceeded"
    )
