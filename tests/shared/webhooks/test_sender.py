from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shared.connection import connect
from shared.settings import Settings
from shared.webhooks.outbox import Outbox
from shared.webhooks.sender import GROWTH, JITTER, LONGEST_WAIT_S, LOOK_S, Sender, wait_s
from tests.processes import eventually
from tests.receiver import Receiver
from tests.shared.webhooks.ends import SECRET, Ends, sender_settings


@contextmanager
def sending(settings: Settings, **fields: Any) -> Iterator[Sender]:
    """A sender that works while the block runs."""
    given = sender_settings(settings, **fields)
    sender = Sender(given, connect(given))
    sender.start()
    yield sender
    sender.close()


def until_shown(ends: Ends, job_id: str, status: str) -> Any:
    eventually(lambda: ends.shown(job_id)["status"] == status, f"the webhook is {status}")
    return ends.shown(job_id)


def test_a_webhook_arrives_signed(ends: Ends, settings: Settings) -> None:
    with Receiver() as receiver, sending(settings):
        job_id = ends.end_one(url=f"{receiver.url}/hook")
        shown = until_shown(ends, job_id, "delivered")
        (got,) = receiver.got
    assert (got.path, got.json["type"], got.json["data"]["id"]) == ("/hook", "job.completed", job_id)
    assert got.headers["Content-Type"] == "application/json"
    assert got.id == got.json["id"] == shown["id"]
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 300
    signed = f"{got.id}.{got.headers['webhook-timestamp']}.".encode() + got.body
    digest = hmac.new(b64decode(SECRET.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    assert got.headers["webhook-signature"] == f"v1,{b64encode(digest).decode()}"


def test_it_is_sent_again_until_the_receiver_takes_it(ends: Ends, settings: Settings) -> None:
    with Receiver(500, 302, 200, location="http://127.0.0.1:1/") as receiver, sending(settings):
        shown = until_shown(ends, ends.end_one(url=receiver.url), "delivered")
    assert [got.status for got in receiver.got] == [500, 302, 200]
    assert len({got.id for got in receiver.got}) == len({got.body for got in receiver.got}) == 1
    assert [a["status"] for a in shown["attempts"]] == [500, 302, 200]
    assert [a["error"] for a in shown["attempts"]] == [
        "the receiver answered 500",
        "the receiver answered 302; redirects are not followed",
        None,
    ]


def test_it_is_given_up_after_a_while(ends: Ends, settings: Settings) -> None:
    with Receiver(500) as receiver, sending(settings, webhook_retry_s=0.1):
        shown = until_shown(ends, ends.end_one(url=receiver.url), "failed")
    assert len(shown["attempts"]) == len(receiver.got) >= 2
    assert shown["next_attempt_at"] is None


def test_what_cannot_be_sent_shows_why(ends: Ends, settings: Settings) -> None:
    with sending(settings, webhook_allow_private=False, webhook_retry_s=0):
        shown = until_shown(ends, ends.end_one(url="http://127.0.0.1:1/"), "failed")
    assert [(a["status"], a["error"]) for a in shown["attempts"]] == [
        (None, "127.0.0.1 is 127.0.0.1, which is not a public address")
    ]


def test_receivers_that_hang_hold_up_only_their_own(ends: Ends, settings: Settings) -> None:
    with sending(settings, webhook_senders=4, webhook_timeout_s=60), Receiver() as receiver:
        for _ in range(3):
            ends.end_one(url=f"{receiver.url}/hang")
        eventually(lambda: len(receiver.of("/hang")) == 3, "three hang")
        for job_id in [ends.end_one(url=f"{receiver.url}/fast") for _ in range(10)]:
            until_shown(ends, job_id, "delivered")
        assert len(receiver.of("/fast")) == 10


def test_no_more_are_sent_at_once_than_the_setting_says(ends: Ends, settings: Settings) -> None:
    with sending(settings, webhook_senders=2, webhook_timeout_s=60), Receiver() as receiver:
        jobs = [ends.end_one(url=f"{receiver.url}/hang") for _ in range(5)]
        eventually(lambda: len(receiver.got) == 2, "two are sent")
        time.sleep(2 * LOOK_S)
        claimed = [job_id for job_id in jobs if b"tries" in ends.stored(ends.shown(job_id)["id"])]
        assert len(claimed) == len(receiver.got) == 2


def test_a_webhook_outlives_the_sender_that_had_claimed_it(ends: Ends, settings: Settings) -> None:
    with Receiver() as receiver:
        job_id = ends.end_one(url=receiver.url)
        (lost,) = Outbox(ends.client).claim(1, lease_s=0.3)  # by a sender that dies at once
        with sending(settings):
            shown = until_shown(ends, job_id, "delivered")
        assert [got.id for got in receiver.got] == [lost.id] == [shown["id"]]


def test_a_webhook_whose_settling_was_lost_comes_twice_with_the_same_id(ends: Ends, settings: Settings) -> None:
    with Receiver() as receiver:
        job_id = ends.end_one(url=receiver.url)
        given = sender_settings(settings)
        broken = Sender(given, connect(given))
        broken._outbox.settle = lambda *_: (_ for _ in ()).throw(OSError("killed"))  # type: ignore[method-assign]
        broken.start()
        eventually(lambda: len(receiver.got) == 1, "it arrives")
        broken.close()
        assert ends.shown(job_id)["status"] == "pending"
        ends.make_due()
        with sending(settings):
            until_shown(ends, job_id, "delivered")
        assert len(receiver.got) == 2
        assert len({got.id for got in receiver.got}) == 1


def test_several_senders_share_the_work(ends: Ends, settings: Settings) -> None:
    with Receiver() as receiver, sending(settings), sending(settings), sending(settings):
        jobs = [ends.end_one(url=receiver.url) for _ in range(30)]
        for job_id in jobs:
            until_shown(ends, job_id, "delivered")
        assert sorted(got.json["data"]["id"] for got in receiver.got) == sorted(jobs)


def test_nothing_is_sent_without_a_secret(ends: Ends, settings: Settings) -> None:
    with sending(settings, webhook_secret="") as sender:
        assert not sender._thread.is_alive()


def test_a_sender_that_was_told_to_stop_claims_no_more(ends: Ends, settings: Settings) -> None:
    with sending(settings) as sender:
        sender.stop()
        sender._thread.join()
        job_id = ends.end_one(url="http://127.0.0.1:1/")
        assert ends.shown(job_id)["attempts"] == []
        assert len(ends.outbox) == 1


@pytest.mark.parametrize(("attempt", "factor"), [(1, 1), (2, GROWTH), (3, GROWTH**2), (5, GROWTH**4)])
def test_waits_grow_by_the_same_factor(attempt: int, factor: float) -> None:
    assert wait_s(attempt, 5.0, lambda: 0.5) == 5.0 * factor


def test_waits_are_spread_and_bounded() -> None:
    assert wait_s(1, 10.0, lambda: 0.0) == pytest.approx(10.0 * (1 - JITTER))
    assert wait_s(1, 10.0, lambda: 1.0) == pytest.approx(10.0 * (1 + JITTER))
    assert wait_s(1000, 5.0, lambda: 0.5) == LONGEST_WAIT_S
    assert len({wait_s(1, 5.0) for _ in range(20)}) > 1


def test_the_default_waits_spread_ten_attempts_over_a_day() -> None:
    waits: list[float] = []
    tried = 1
    while sum(waits) + (wait := wait_s(tried, 5.0, lambda: 0.5)) <= 86_400:
        waits.append(wait)
        tried += 1
    assert tried == 10
