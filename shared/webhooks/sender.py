"""Sends what is in the outbox, on threads of its own, so that nobody who works on jobs or requests waits for it.

due ─▶ claimed ─▶ sent ─▶ delivered                        a status of 2xx
          ▲          ├──▶ failed                           410, or tried for `webhook_retry_s`
          └── wait ◀─┘                                     anything else, a redirect too
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import redis
from redis.exceptions import RedisError

from shared.settings import WebSettings
from shared.webhooks.outbox import Attempt, Outbox, Webhook
from shared.webhooks.posting import NotSent, Poster
from shared.webhooks.signing import keys_of, signed_headers

log = logging.getLogger("slotline.webhooks")

#: How often the outbox is looked at while nothing is going on.
LOOK_S = 0.5
#: Beyond the time limit of an attempt, for which a claim holds: name resolution has time limits of its own.
CLAIM_SPARE_S = 60.0
#: Each wait is this many times the one before, up to the longest.
GROWTH = 4.0
LONGEST_WAIT_S = 6 * 3600.0
#: Waits differ by so much of their length, so that what failed together does not come back together.
JITTER = 0.2


def wait_s(attempt: int, first_s: float, chance: Callable[[], float] = random.random) -> float:
    """Seconds between an attempt, counted from 1, and the next one. `chance` gives numbers from 0 to 1."""
    steps = min(attempt - 1, 32)  # the power must stay a number
    return float(min(first_s * GROWTH**steps, LONGEST_WAIT_S) * (1 - JITTER + 2 * JITTER * chance()))


class Sender:
    """Claims and sends webhooks until it is closed; at most `webhook_senders` at once.

    `client` is for the outbox alone. Without a secret nothing is sent.
    """

    def __init__(self, settings: WebSettings, client: redis.Redis) -> None:
        self._settings = settings
        self._client = client
        self._outbox = Outbox(client)
        self._keys = keys_of(settings.webhook_secret)
        self._poster = Poster(settings.webhook_timeout_s, settings.webhook_allow_private)
        self._lock = threading.Lock()
        self._sending: set[threading.Thread] = set()
        self._stopping = threading.Event()
        self._news = threading.Event()
        # A process that ends does not wait for receivers: what is left unsettled is sent again by another.
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Start the thread, where there is a secret to sign with."""
        if self._keys:
            self._thread.start()

    def stop(self) -> None:
        """Claim no more; what is being sent goes on. Returns at once."""
        self._stopping.set()
        self._news.set()

    def close(self) -> None:
        """Stop, and wait for what is being sent."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            sending = list(self._sending)
        for thread in sending:
            thread.join()
        self._poster.close()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news.clear()
            try:
                self._send_due()
            except RedisError as error:
                log.debug("the outbox waits for Redis: %s", error)
            except Exception:
                # The next look may go well, and nobody else would look.
                log.exception("a defect in sending webhooks")
            # Whoever is through with one makes room for the next.
            self._news.wait(LOOK_S)

    def _send_due(self) -> None:
        with self._lock:
            room = self._settings.webhook_senders - len(self._sending)
        if room <= 0:
            return
        for webhook in self._outbox.claim(room, self._settings.webhook_timeout_s + CLAIM_SPARE_S):
            thread = threading.Thread(target=self._send, args=[webhook], name="webhook", daemon=True)
            with self._lock:  # it takes itself out under the lock, so not before it is in
                thread.start()
                self._sending.add(thread)

    def _send(self, webhook: Webhook) -> None:
        try:
            attempt = self._attempt(webhook)
            wait = wait_s(webhook.attempt, self._settings.webhook_backoff_s)
            state = self._outbox.settle(webhook, attempt, wait, self._settings.webhook_retry_s)
            if state == "failed":
                log.warning("webhook %s is given up: %s", webhook.id, attempt.error)
        except RedisError as error:
            log.warning("webhook %s is sent again when its claim has run out: %s", webhook.id, error)
        except Exception:
            log.exception("a defect in sending webhook %s", webhook.id)
        finally:
            with self._lock:
                self._sending.discard(threading.current_thread())
            self._news.set()

    def _attempt(self, webhook: Webhook) -> Attempt:
        body, now = webhook.body(), time.time()
        headers = signed_headers(self._keys, webhook.id, int(now), body)
        headers |= {"Content-Type": "application/json", "User-Agent": "Slotline-Webhooks"}
        try:
            status = self._poster.post(webhook.url, headers, body)
        except NotSent as error:
            return Attempt(now, None, str(error))
        return Attempt(now, status, _refusal(status))


def _refusal(status: int) -> str | None:
    """What is wrong with a status; None with one that says that the webhook has arrived."""
    if 200 <= status < 300:
        return None
    redirected = "; redirects are not followed" if 300 <= status < 400 else ""
    return f"the receiver answered {status}{redirected}"
