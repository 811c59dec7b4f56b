"""A small world around the job store: jobs of the model `m`, and RQ's own view of the same queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from rq import Queue
from rq.executions import Execution
from rq.job import Job, JobStatus

from shared.jobs import JobStore
from shared.names import PRIORITIES, SERIALIZER, queue_name
from shared.records import job_object
from shared.schemas import JobRequest
from shared.stream import Append, EventId, dumps
from shared.work import CommitOutcome, End, Pulled

MODEL = "m"
QUEUES = [queue_name(MODEL, priority) for priority in PRIORITIES]
NORMAL = queue_name(MODEL, "normal")


class World:
    """What the tests of jobs do over and over, in few words."""

    def __init__(self, store: JobStore, client: redis.Redis) -> None:
        self.store = store
        self.client: Any = client
        self.queue = Queue(NORMAL, connection=client, serializer=SERIALIZER)

    def submit(self, **body: Any) -> str:
        return self.store.submit(JobRequest(**{"prompt": "hello", **body}), MODEL).job_id

    def pull(self, worker: str = "w1", count: int = 1, queues: Sequence[str] = QUEUES) -> list[Pulled]:
        return self.store.pull(worker, queues, count)

    def take(self, worker: str = "w1", **body: Any) -> Pulled:
        """Submit a job and pull it."""
        job_id = self.submit(**body)
        (pulled,) = self.pull(worker)
        assert pulled.record.id == job_id
        return pulled

    def say(self, pulled: Pulled, *texts: str, start: int = 0) -> list[str]:
        """Append one token for each text; the executions that were refused."""
        return self.store.stream.append(
            [token(pulled.record.id, pulled.execution, start + i, text) for i, text in enumerate(texts)]
        )

    def end(self, pulled: Pulled, status: Any = "completed", tokens: int = 0, ttl_s: int = 100) -> CommitOutcome:
        """Commit the end of one job."""
        (outcome,) = self.store.commit([end_of(pulled, status, tokens, ttl_s)])
        return outcome

    def record(self, pulled: Pulled, status: JobStatus) -> None:
        """Do to RQ's record what the worker's finaliser does after the commit."""
        job = self.job(pulled.record.id)
        execution = Execution(pulled.execution, job.id, self.client, worker_name=pulled.record.worker)
        with self.client.pipeline() as pipe:
            if status == JobStatus.FINISHED:
                job._handle_success(100, pipeline=pipe)
                job.cleanup(100, pipeline=pipe, remove_from_queue=False)
            else:
                job.set_status(status, pipeline=pipe)
                job._handle_failure("it broke", pipeline=pipe)
            execution.delete(job=job, pipeline=pipe)
            pipe.lrem("slotline:held:w1", 0, job.id)
            pipe.execute()

    def job(self, job_id: str) -> Job:
        return Job.fetch(job_id, connection=self.client, serializer=SERIALIZER)

    def events(self, job_id: str) -> list[str]:
        return [event.name for event in self.store.stream.replay(job_id)]

    def waiting(self, queue: str = NORMAL) -> list[str]:
        """Ids on a queue, the next one first."""
        return [i.decode() for i in self.client.lrange(f"rq:queue:{queue}", 0, -1)]

    def held(self, worker: str = "w1") -> list[str]:
        return [i.decode() for i in self.client.lrange(f"slotline:held:{worker}", 0, -1)]

    def field(self, job_id: str, name: str) -> str | None:
        value = self.client.hget(f"rq:job:{job_id}", name)
        return None if value is None else value.decode()

    def keys(self) -> set[str]:
        return {key.decode() for key in self.client.keys("*")}

    def expire(self, key: str) -> None:
        """Let Redis itself drop a key by its time, and wait until it has."""
        assert self.client.pexpire(key, 1), f"{key} is not there"
        until(lambda: not self.client.exists(key))


def token(job_id: str, execution: str, index: int, text: str = "x") -> Append:
    data = dumps({"index": index, "text": text, "token": 7})
    return Append(job_id, execution, str(EventId.of_token(index)), "token", data)


def end_of(pulled: Pulled, status: Any = "completed", tokens: int = 0, ttl_s: int = 100) -> End:
    error = {"message": "it broke", "type": "generation_error", "code": "internal_error", "param": None}
    final = job_object(
        pulled.record,
        status=status,
        ended_at=time.time(),
        ttl_s=ttl_s,
        text="x" * tokens,
        finish_reason={"completed": "stop", "cancelled": "cancelled", "failed": None}[status],
        error=error if status == "failed" else None,
    )
    return End(pulled.record.id, pulled.execution, final, tokens, ttl_s)


def until(condition: Callable[[], Any], limit_s: float = 10.0) -> None:
    """Ask again and again until the condition holds; no fixed pause decides."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
