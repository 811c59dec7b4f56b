"""What Slotline is measured against: the libraries it is built on, with no model and nothing of Slotline.

The barest path from a POST over RQ to a streamed token is a Flask app and a worker, each as the documentation of its
libraries has it: subscribe, enqueue, pull, publish, stream. Nothing is checked, limited, logged, resumed or recorded.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import redis
from flask import Flask, Response, request
from rq import Queue
from rq.serializers import JSONSerializer

#: The environment variable with the address of Redis.
REDIS_URL = "BARE_REDIS_URL"
QUEUE = "bare"


def create_app() -> Flask:
    """The web side; gunicorn calls this in its worker process."""
    app = Flask(__name__)
    client: Any = redis.Redis.from_url(os.environ[REDIS_URL])
    queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)

    @app.get("/")
    def ready() -> str:
        return "ready"

    @app.post("/")
    def complete() -> Response:
        job_id = uuid.uuid4().hex
        channel: Any = client.pubsub(ignore_subscribe_messages=True)
        channel.subscribe(job_id)
        queue.enqueue_call("bare.generate", args=(request.get_json(),), job_id=job_id)
        return Response(_frames(channel), content_type="text/event-stream")

    return app


def _frames(channel: Any) -> Iterator[bytes]:
    with channel:
        for message in channel.listen():
            yield b"data: " + message["data"] + b"\n\n"
            if message["data"] == b"[DONE]":
                return


def nothing() -> None:
    """A job that does nothing."""


def work(url: str) -> None:
    """The worker: one job at a time, whose answer is one token. It never returns."""
    client = redis.Redis.from_url(url, socket_timeout=120)
    queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)
    while True:
        found = Queue.dequeue_any([queue], 60, connection=client, serializer=JSONSerializer)
        if found is not None:
            job, _ = found
            client.publish(job.id, json.dumps({"text": job.args[0]["prompt"][:1]}))
            client.publish(job.id, "[DONE]")


if __name__ == "__main__":
    work(sys.argv[1])
