"""What became of every job, stream and batch of a run under chaos."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import redis

from shared.names import events_key
from tests.chaos.load import BATCH_LINES, UserJob, batch_text

ENDS = ("done", "failed")


@dataclass(slots=True)
class Audit:
    """The counts, and a sentence for each thing that is wrong.

    Attributes:
        lost: jobs that were accepted and did not come to their own end. One that failed with `worker_lost` is lost.
        doubled: jobs that ended twice, or started twice without a recovery between; lines of batches with two rows.
        gaps: streams with a token missing, twice, or out of order.
        mismatches: texts that differ: stream, result, and what the scripted model answers.
    """

    lost: int = 0
    doubled: int = 0
    gaps: int = 0
    mismatches: int = 0
    faults: list[str] = field(default_factory=list)
    #: When a cancel may have been forgotten (`Store.forgotten`).
    forgotten: list[tuple[float, float]] = field(default_factory=list)

    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.doubled or self.gaps or self.mismatches)

    def job(self, client: redis.Redis, url: str, job: UserJob) -> None:
        """Look at one job of a user."""
        if not job.id:
            return  # never accepted
        answer = httpx.get(f"{url}/v1/jobs/{job.id}", timeout=30)
        if answer.status_code != 200:
            self._note("lost", job, f"is answered with {answer.status_code}")
            return
        shown = answer.json()
        expected = self._expected(job)
        if shown["status"] not in expected:
            self._note("lost", job, f"is {shown['status']}, not {' or '.join(expected)}: {shown.get('error')}")
        names = Counter(name for name in _logged(client, job.id))
        if sum(names[end] for end in ENDS) > 1 or names["started"] > 1:
            self._note("doubled", job, f"has in its log {dict(names)}")
        if sum(name in ENDS for _, name, _ in job.events) > 1:
            self._note("doubled", job, "told its reader of two ends")
        self._texts(job, shown)

    def _expected(self, job: UserJob) -> tuple[str, ...]:
        at = job.cancelled_at
        if at is None:
            return ("completed",)
        # A little more, since the answer to a cancel comes after it.
        if any(begin <= at <= end + 1 for begin, end in self.forgotten):
            return ("cancelled", "completed")
        return ("cancelled",)

    def _texts(self, job: UserJob, shown: dict[str, Any]) -> None:
        text = shown.get("text") or ""
        if shown["status"] == "completed" and text != job.text:
            self._note("mismatches", job, f"answered {text!r}, not {job.text!r}")
        elif not job.text.startswith(text):
            self._note("mismatches", job, f"was cancelled with {text!r}, which does not begin {job.text!r}")
        if not job.reads or not job.is_done:
            return
        tokens = [data for _, name, data in job.events if name == "token"]
        indices = [token["index"] for token in tokens]
        if any(name == "gap" for _, name, _ in job.events) or indices != list(range(len(indices))):
            self._note("gaps", job, f"streamed the tokens {indices}")
        read = "".join(token["text"] for token in tokens)
        if read != text:
            self._note("mismatches", job, f"streamed {read!r} and has {text!r}")

    def batch(self, url: str, number: int, batch_id: str) -> None:
        """Look at one batch, which must have ended."""
        batch = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=30).json()
        if batch.get("status") != "completed":
            self.lost += 1
            self.faults.append(f"batch {number} ({batch_id}) is {batch.get('status')}")
            return
        content = httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content", timeout=30).text
        rows = [json.loads(line) for line in content.splitlines()]
        times = Counter(row["custom_id"] for row in rows)
        for line in range(BATCH_LINES):
            count = times[f"line-{line}"]
            if count != 1:
                self.lost += count == 0
                self.doubled += count > 1
                self.faults.append(f"batch {number} has {count} rows of line {line}")
        for row in rows:
            answer = row["response"]["body"]["choices"][0]["message"]["content"]
            if answer != batch_text(number, int(row["custom_id"].removeprefix("line-"))):
                self.mismatches += 1
                self.faults.append(f"batch {number} answers {row['custom_id']} with {answer!r}")

    def _note(self, count: str, job: UserJob, what: str) -> None:
        setattr(self, count, getattr(self, count) + 1)
        self.faults.append(f"job {job.number} ({job.id}) {what}")


def _logged(client: redis.Redis, job_id: str) -> list[str]:
    """The names of the events in a job's log."""
    entries: Any = client.xrange(events_key(job_id))
    return [values[b"event"].decode() for _, values in entries]
