"""A world in which jobs and batches end with webhooks."""

from __future__ import annotations

from typing import Any

from shared.batches.store import BatchStore
from shared.names import WEBHOOKS, file_key, webhook_key
from shared.settings import Settings, WebSettings, load
from tests.shared.world import World

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
URL = "https://example.com/hook"


class Ends(World):
    """The world of the job store, in which jobs have a webhook."""

    def end_one(self, status: Any = "completed", url: str = URL) -> str:
        """Submit a job and let it end; its id."""
        pulled = self.take(webhook_url=url)
        assert self.end(pulled, status) == "ok"
        return pulled.record.id

    @property
    def batches(self) -> BatchStore:
        return BatchStore(self.client, self.store.settings)

    def begin_batch(self, url: str = URL) -> tuple[str, int]:
        """Create a batch and become its runner; its id and the fence."""
        self.client.hset(file_key("file-1"), mapping={"purpose": "batch"})
        batch = self.batches.create("file-1", "/v1/embeddings", "24h", {"who": "é"}, webhook_url=url)
        fence = self.batches.acquire(batch.id, "runner", 60)
        assert fence is not None
        return batch.id, fence

    def shown(self, job_id: str) -> Any:
        """What the job's object says of its webhook."""
        return self.store.view(job_id)["webhook"]

    @property
    def outbox(self) -> list[str]:
        return [found.decode() for found in self.client.zrange(WEBHOOKS, 0, -1)]

    def make_due(self) -> None:
        """Let every wait and every claim be over."""
        for webhook_id in self.outbox:
            self.client.zadd(WEBHOOKS, {webhook_id: 0})

    def stored(self, webhook_id: str) -> Any:
        return self.client.hgetall(webhook_key(webhook_id))


def sender_settings(settings: Settings, **fields: Any) -> WebSettings:
    given = {"webhook_secret": SECRET, "webhook_allow_private": True, "webhook_backoff_s": 0.01}
    return load(WebSettings, {"redis_url": settings.redis_url} | given | fields)
