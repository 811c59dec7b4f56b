"""The users of a run under chaos: jobs that are submitted, read and cancelled over HTTP, and batches.

A user does what a good client does: it repeats a submit with the same `Idempotency-Key` until it is answered, and
reads on after its last event when a connection ends. Everything it was told is kept, for the audit.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

SENTENCE = "the queue keeps every job and every reader gets each token once in order whatever ends in between"
WORDS = SENTENCE.split()
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled")

#: A user gives up on a job that shows no sign of life for so long. It is then lost.
PATIENCE_S = 180.0


@dataclass(slots=True)
class UserJob:
    """One job, and what its user saw.

    Attributes:
        number: its place in the run; also its idempotency key.
        text: its prompt, which the scripted model repeats.
        id: known from the first answer that told it.
        events: (id, name, data) of all that its reader got.
        cancelled_at: when a cancel was answered with 200, in monotonic seconds.
        is_done: whether its user has nothing more to do.
    """

    number: int
    text: str
    reads: bool
    drops: bool
    id: str = ""
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    cancelled_at: float | None = None
    is_done: bool = False


class Users:
    """So many users at once, each with one job after another, until they are told to stop."""

    def __init__(self, url: str, count: int, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.jobs: list[UserJob] = []
        self.batches: list[str] = []
        self._threads = [threading.Thread(target=self._use, name=f"user-{i}", daemon=True) for i in range(count)]
        self._threads.append(threading.Thread(target=self._use_batches, name="user-of-batches", daemon=True))

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin nothing new."""
        self._stopping.set()

    def join(self) -> list[str]:
        """Wait until all jobs that were begun have been followed to their ends; returns what did not come to one."""
        for thread in self._threads:
            thread.join()
        return [f"job {job.number} ({job.id}) has no end" for job in self.jobs if not job.is_done]

    def cancel_one(self) -> None:
        """Cancel a job that is under way."""
        with self._lock:
            candidates = [job for job in self.jobs if job.id and not job.is_done and job.cancelled_at is None]
            job = self._random.choice(candidates) if candidates else None
        if job is not None:
            answer = self._ask("POST", f"/v1/jobs/{job.id}/cancel", tries=3)
            if answer is not None and answer.status_code == 200:
                job.cancelled_at = time.monotonic()

    # --- jobs ---

    def _use(self) -> None:
        while not self._stopping.is_set():
            job = self._new_job()
            if self._submit(job):
                self._follow(job) if job.reads else self._poll(job)

    def _new_job(self) -> UserJob:
        with self._lock:
            chance, number = self._random, len(self.jobs)
            words = chance.choices(WORDS, k=chance.randint(4, 30))
            job = UserJob(number, f"{number}: {' '.join(words)}", chance.random() < 0.7, chance.random() < 0.3)
            self.jobs.append(job)
            return job

    def _submit(self, job: UserJob) -> bool:
        body = {"prompt": job.text, "temperature": 0, "max_tokens": 400, "stream": job.reads}
        headers = {"Idempotency-Key": f"job-{job.number}"}
        answer = self._ask("POST", "/v1/jobs", json=body, headers=headers)
        if answer is None:
            return False
        job.id = answer.json()["id"]
        return True

    def _poll(self, job: UserJob) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            answer = self._ask("GET", f"/v1/jobs/{job.id}", tries=1)
            if answer is not None and answer.status_code == 200 and answer.json()["status"] in ENDED:
                job.is_done = True
                return
            time.sleep(0.3)

    def _follow(self, job: UserJob) -> None:
        """Read all events, over as many connections as it takes."""
        last = ""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            leaves_after = self._random.randint(1, 60) if job.drops else 0
            try:
                for event in self._events(job.id, last):
                    deadline = time.monotonic() + PATIENCE_S
                    job.events.append(event)
                    last = event[0] or last
                    if event[1] in ("done", "failed"):
                        job.is_done = True
                        return
                    leaves_after -= 1
                    if leaves_after == 0:
                        break
            except (httpx.HTTPError, OSError):
                pass  # this is what it is about: the connection is gone, and there will be another
            time.sleep(self._random.uniform(0.05, 0.5))

    def _events(self, job_id: str, last: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        headers = {"Last-Event-ID": last} if last else {}
        timeout = httpx.Timeout(5.0, read=30.0)
        with httpx.stream("GET", f"{self._url}/v1/jobs/{job_id}/events", headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                return
            event: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    key, _, value = line.partition(": ")
                    event[key] = value
                elif "data" in event:
                    yield event.get("id", ""), event.get("event", "message"), json.loads(event["data"])
                    event = {}
                else:
                    event = {}

    # --- batches ---

    def _use_batches(self) -> None:
        while not self._stopping.is_set():
            number = len(self.batches)
            lines = "\n".join(json.dumps(batch_line(number, i)) for i in range(BATCH_LINES)).encode()
            form = {"purpose": (None, "batch"), "file": ("input.jsonl", lines, "application/jsonl")}
            file = self._ask("POST", "/v1/files", files=form)
            if file is None:
                continue
            body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
            batch = self._ask("POST", "/v1/batches", json=body, headers={"Idempotency-Key": f"batch-{number}"})
            if batch is not None:
                self.batches.append(batch.json()["id"])
                self._stopping.wait(15)

    # --- HTTP ---

    def _ask(self, method: str, path: str, tries: int = 0, **options: Any) -> httpx.Response | None:
        """The answer, asked for again while there is none or the server says that it cannot now; None at the end.

        An answer that says that the question was wrong is one. With `tries` 0 it is asked for `PATIENCE_S`.
        """
        deadline, tried = time.monotonic() + PATIENCE_S, 0
        while time.monotonic() < deadline and (not tries or tried < tries):
            tried += 1
            try:
                answer = httpx.request(method, self._url + path, timeout=15.0, **options)
            except (httpx.HTTPError, OSError):
                answer = None
            if answer is not None and answer.status_code < 500 and answer.status_code != 429:
                return answer
            time.sleep(0.2)
        return None


BATCH_LINES = 20


def batch_line(batch: int, line: int) -> dict[str, Any]:
    """A line whose answer is its own text."""
    content = batch_text(batch, line)
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    return {"custom_id": f"line-{line}", "method": "POST", "url": CHAT, "body": body}


def batch_text(batch: int, line: int) -> str:
    """What a line of a batch says, and what is answered."""
    return f"batch {batch} line {line} " * (1 + line % 4)
