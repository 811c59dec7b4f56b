from __future__ import annotations

import inspect

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from rq import Queue
from rq.job import Job, validate_job_id

from shared import names
from shared.names import JOB_ID, MODEL_NAME, PRIORITIES, SERIALIZER, queue_name, rq_queue_key, split_queue_name

models = st.from_regex(MODEL_NAME, fullmatch=True)


@given(model=models, priority=st.sampled_from(PRIORITIES), tenant=st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True))
def test_a_queue_name_gives_its_model_and_priority_back(model: str, priority: str, tenant: str) -> None:
    assert split_queue_name(queue_name(model, priority, tenant)) == (model, priority)


@pytest.mark.parametrize("name", ["", "default", "m:normal", "m:urgent:default", "m:normal:default:x", ":::"])
def test_a_queue_that_is_not_named_by_our_rule_counts_as_normal(name: str) -> None:
    assert split_queue_name(name) == (name, "normal")


def test_the_most_urgent_priority_comes_first() -> None:
    assert PRIORITIES == ("interactive", "normal", "batch")


@given(st.from_regex(JOB_ID, fullmatch=True))
def test_rq_takes_every_id_we_take(job_id: str) -> None:
    validate_job_id(job_id)
    assert Job(job_id, connection=Redis()).id == job_id


@pytest.mark.parametrize("job_id", ["", "a:b", "a b", "-a", "a\n", "é", "a" * 129])
def test_an_id_that_would_break_a_key_is_refused(job_id: str) -> None:
    assert not JOB_ID.fullmatch(job_id)


@pytest.mark.parametrize("model", ["", "a:b", "a b", "/a", "a\n", "é", "a" * 129])
def test_a_model_name_that_would_break_a_key_is_refused(model: str) -> None:
    assert not MODEL_NAME.fullmatch(model)


def test_the_keys_of_rq_are_rqs_own(client: redis.Redis) -> None:
    assert rq_queue_key("m:normal:default") == Queue("m:normal:default", connection=client).key
    assert names.job_key("j1") == Job.key_for("j1")


def test_no_two_of_our_keys_can_meet() -> None:
    makers = [f for name, f in inspect.getmembers(names, inspect.isfunction) if name.endswith("_key")]
    assert len(makers) >= 10
    keys = [make(*"xyz"[: len(inspect.signature(make).parameters)]) for make in makers] + [
        names.JOBS_INDEX,
        names.MODELS,
        names.WORKERS,
    ]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith(("slotline:", "rq:")) for key in keys)


def test_the_queue_never_carries_pickle() -> None:
    assert SERIALIZER.dumps(["é", None]) == b'["\\u00e9", null]'
    with pytest.raises(TypeError):
        SERIALIZER.dumps(object())
