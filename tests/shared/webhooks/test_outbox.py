from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import openai
import pytest
import redis
from rq.utils import now, utcformat

from shared.batches.schemas import BatchObject
from shared.deadlines import Deadlines
from shared.names import DEADLINES, job_key
from shared.results import JobObject
from shared.strays import Strays
from shared.webhooks.outbox import Attempt, Outbox, Webhook
from shared.webhooks.signing import keys_of, signed_headers
from shared.webhooks.state import WebhookState
from tests.shared.webhooks.ends import SECRET, URL, Ends
from tests.shared.world import QUEUES

LEASE_S = 60.0
GOOD = Attempt(1700000000.1234, 200, None)
BAD = Attempt(1700000000.5, 500, "the receiver answered 500")
SILENT = Attempt(1700000001.0, None, 'no "answer"')
DAY_S = 86_400.0


@pytest.fixture
def outbox(client: redis.Redis) -> Outbox:
    return Outbox(client)


def claim_one(outbox: Outbox) -> Webhook:
    (webhook,) = outbox.claim(10, LEASE_S)
    return webhook


# --- what gets there ---


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_the_end_of_a_job_puts_its_object_into_the_outbox(ends: Ends, outbox: Outbox, status: str) -> None:
    job_id = ends.end_one(status)
    webhook = claim_one(outbox)
    body = json.loads(webhook.body())
    assert (webhook.url, webhook.type, webhook.attempt) == (URL, f"job.{status}", 1)
    assert list(body) == ["id", "object", "type", "created_at", "timestamp", "data"]
    assert (body["id"], body["object"], body["type"]) == (webhook.id, "event", f"job.{status}")
    assert abs(body["created_at"] - time.time()) < 300
    assert body["timestamp"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(body["created_at"]))
    JobObject.model_validate(body["data"])
    assert (body["data"]["id"], body["data"]["status"]) == (job_id, status)
    assert body["data"] | {"webhook": None} == ends.store.view(job_id) | {"webhook": None}


def test_a_job_cancelled_while_it_waits_has_one_too(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.submit(webhook_url=URL)
    ends.store.cancel(job_id)
    ends.store.cancel(job_id)
    webhook = claim_one(outbox)
    assert (webhook.type, json.loads(webhook.body())["data"]["id"]) == ("job.cancelled", job_id)


def test_a_job_that_waited_for_one_that_failed_has_one_too(ends: Ends, outbox: Outbox) -> None:
    first = ends.take()
    later = ends.submit(depends_on=first.record.id, webhook_url=URL)
    ends.end(first, "failed")
    ends.store.end_dependents(first.record.id)
    body = json.loads(claim_one(outbox).body())
    assert (body["type"], body["data"]["id"], body["data"]["error"]["code"]) == (
        "job.cancelled",
        later,
        "dependency_failed",
    )


def test_a_job_that_waited_longer_than_it_may_has_one_too(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.submit(queue_timeout_s=10, webhook_url=URL)
    ends.client.hset(job_key(job_id), "enqueued_at", utcformat(now() - timedelta(seconds=11)))
    ends.client.zincrby(DEADLINES, -11, job_id)
    assert Deadlines(ends.store).expire() == [job_id]
    body = json.loads(claim_one(outbox).body())
    assert (body["type"], body["data"]["error"]["code"]) == ("job.failed", "queue_timeout")


def test_a_job_that_rqs_own_tools_cancelled_has_one_too(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.submit(webhook_url=URL)
    ends.job(job_id).cancel()
    Strays(ends.store).settle(QUEUES)
    assert claim_one(outbox).type == "job.cancelled"


def test_a_job_without_a_url_has_none(ends: Ends) -> None:
    ends.end(ends.take())
    ends.store.cancel(ends.submit())
    assert ends.outbox == []
    names = ends.keys()
    assert not [name for name in names if "webhook" in name]


def test_an_end_that_is_not_accepted_sends_nothing(ends: Ends) -> None:
    pulled = ends.take(webhook_url=URL)
    ends.store.cancel(pulled.record.id)
    assert ends.end(pulled, "completed") == "cancelled"
    assert ends.outbox == []
    assert ends.end(pulled, "cancelled") == "ok"
    assert ends.end(pulled, "cancelled") == "ended"
    assert len(ends.outbox) == 1


def test_each_end_of_a_job_that_is_run_again_has_its_own(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.submit(webhook_url=URL)
    ends.store.cancel(job_id)
    first = claim_one(outbox)
    ends.store.retry(job_id)
    (pulled,) = ends.pull()
    ends.end(pulled, "completed")
    second = claim_one(outbox)
    assert [first.type, second.type] == ["job.cancelled", "job.completed"]
    assert first.id != second.id
    assert ends.shown(job_id)["id"] == second.id
    # The late news of the first end is not shown as that of the second.
    outbox.settle(first, GOOD, 1, DAY_S)
    assert ends.shown(job_id)["attempts"] == []
    outbox.settle(second, BAD, 1, DAY_S)
    assert [a["status"] for a in ends.shown(job_id)["attempts"]] == [500]


@pytest.mark.parametrize("status", ["completed", "expired", "cancelled", "failed"])
def test_the_end_of_a_batch_puts_its_object_into_the_outbox(ends: Ends, outbox: Outbox, status: Any) -> None:
    batch_id, fence = ends.begin_batch()
    error = {"code": "invalid_json", "line": 1, "message": "bad / worse", "param": None}
    if status == "failed":
        assert ends.batches.fail_validation(batch_id, fence, [error]) == "failed"
    else:
        if status == "cancelled":
            ends.batches.cancel(batch_id)
        ends.batches.start(batch_id, fence, 0, "tiny")
        assert ends.batches.finish(batch_id, fence, status) == status
    webhook = claim_one(outbox)
    body = json.loads(webhook.body())
    assert (body["type"], body["id"]) == (f"batch.{status}", webhook.id)
    BatchObject.model_validate(body["data"])
    assert body["data"] | {"webhook": None} == ends.batches.get(batch_id).shown() | {"webhook": None}
    assert (body["data"]["status"], body["data"]["metadata"]) == (status, {"who": "é"})


def test_a_batch_that_is_run_again_does_not_change_what_was_said_of_its_end(ends: Ends, outbox: Outbox) -> None:
    batch_id, fence = ends.begin_batch()
    ends.batches.start(batch_id, fence, 0, "tiny")
    ends.batches.finish(batch_id, fence, "expired")
    ends.client.hset(f"slotline:batch:{batch_id}", mapping={"status": "in_progress"})
    assert json.loads(claim_one(outbox).body())["data"]["status"] == "expired"


# --- claims ---


def test_a_claimed_webhook_is_nobody_elses_until_the_claim_has_run_out(ends: Ends, outbox: Outbox) -> None:
    ends.end_one()
    first = claim_one(outbox)
    assert outbox.claim(10, LEASE_S) == []
    ends.make_due()
    again = claim_one(outbox)
    assert (again.id, again.attempt, again.body()) == (first.id, 2, first.body())


def test_no_more_are_claimed_than_asked_for_the_oldest_first(ends: Ends, outbox: Outbox) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(ends.end_one())
        time.sleep(0.002)
    claimed = [*outbox.claim(2, LEASE_S), *outbox.claim(2, LEASE_S)]
    assert [json.loads(webhook.data)["id"] for webhook in claimed] == jobs


# --- what comes of them ---


def test_a_delivered_webhook_leaves_only_what_the_job_shows(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    webhook = claim_one(outbox)
    assert outbox.settle(webhook, GOOD, 1, DAY_S) == "delivered"
    assert ends.outbox == [] and ends.stored(webhook.id) == {}
    assert ends.shown(job_id) == {
        "url": URL,
        "id": webhook.id,
        "status": "delivered",
        "attempts": [{"at": 1700000000.123, "status": 200, "error": None}],
        "next_attempt_at": None,
    }


def test_failed_attempts_are_shown_and_the_next_is_due_after_the_wait(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    assert ends.shown(job_id)["attempts"] == []
    assert outbox.settle(claim_one(outbox), BAD, 100, DAY_S) == "pending"
    assert outbox.claim(10, LEASE_S) == []
    ends.make_due()
    assert outbox.settle(claim_one(outbox), SILENT, 100, DAY_S) == "pending"
    shown = ends.shown(job_id)
    WebhookState.model_validate(shown)
    assert [(a["status"], a["error"]) for a in shown["attempts"]] == [(500, BAD.error), (None, SILENT.error)]
    assert shown["status"] == "pending"
    assert 0 < shown["next_attempt_at"] - time.time() <= 100


def test_it_is_given_up_when_the_next_attempt_would_be_too_late(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    webhook = claim_one(outbox)
    assert outbox.settle(webhook, BAD, wait_s=100, limit_s=99) == "failed"
    assert ends.outbox == [] and ends.stored(webhook.id) == {}
    assert (ends.shown(job_id)["status"], ends.shown(job_id)["next_attempt_at"]) == ("failed", None)


def test_a_receiver_that_is_gone_for_good_is_asked_no_more(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    assert outbox.settle(claim_one(outbox), Attempt(1.0, 410, "the receiver answered 410"), 1, DAY_S) == "failed"
    assert ends.outbox == []
    assert ends.shown(job_id)["attempts"][0]["status"] == 410


def test_a_sender_that_was_slow_does_not_move_the_claim_of_the_next(ends: Ends, outbox: Outbox) -> None:
    ends.end_one()
    slow = claim_one(outbox)
    ends.make_due()
    claim_one(outbox)
    assert outbox.settle(slow, BAD, 0, DAY_S) == "pending"
    assert outbox.claim(10, LEASE_S) == []


def test_a_slow_sender_that_delivered_it_spares_the_next_ones(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    slow = claim_one(outbox)
    ends.make_due()
    second = claim_one(outbox)
    assert outbox.settle(slow, GOOD, 1, DAY_S) == "delivered"
    assert outbox.settle(second, BAD, 1, DAY_S) == "gone"
    assert ends.outbox == []
    assert ends.shown(job_id)["status"] == "delivered"


def test_a_webhook_outlives_its_job(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    ends.expire(f"rq:job:{job_id}")
    webhook = claim_one(outbox)
    assert json.loads(webhook.body())["data"]["id"] == job_id
    assert outbox.settle(webhook, GOOD, 1, DAY_S) == "delivered"
    assert not ends.client.exists(f"rq:job:{job_id}")


def test_an_erased_job_takes_its_webhook_along(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    claimed = claim_one(outbox)
    ends.store.erase(job_id)
    assert ends.stored(claimed.id) == {}
    assert outbox.settle(claimed, BAD, 1, DAY_S) == "gone"
    ends.make_due()
    assert outbox.claim(10, LEASE_S) == []
    assert ends.outbox == []


# --- what a receiver makes of them ---


def unwrapped(webhook: Webhook, secret: str = SECRET) -> Any:
    body = webhook.body()
    headers = signed_headers(keys_of(secret), webhook.id, int(time.time()), body)
    with openai.OpenAI(api_key="none", webhook_secret=SECRET) as client:
        return client.webhooks.unwrap(body, headers)


def test_openai_unwraps_the_webhook_of_a_job(ends: Ends, outbox: Outbox) -> None:
    job_id = ends.end_one()
    webhook = claim_one(outbox)
    event = unwrapped(webhook)
    assert (event.id, event.type, event.object) == (webhook.id, "job.completed", "event")
    data = event.data if isinstance(event.data, dict) else event.data.to_dict()
    assert (data["id"], data["status"]) == (job_id, "completed")


def test_openai_unwraps_the_webhook_of_a_batch_as_its_own_type(ends: Ends, outbox: Outbox) -> None:
    batch_id, fence = ends.begin_batch()
    ends.batches.start(batch_id, fence, 0, "tiny")
    ends.batches.finish(batch_id, fence, "completed")
    event = unwrapped(claim_one(outbox))
    assert isinstance(event, openai.types.webhooks.BatchCompletedWebhookEvent)
    assert event.data.id == batch_id


def test_openai_refuses_one_that_was_signed_with_another_secret(ends: Ends, outbox: Outbox) -> None:
    ends.end_one()
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrapped(claim_one(outbox), "whsec_" + "A" * 32)
