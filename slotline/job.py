"""The handle of one job."""

from __future__ import annotations

from typing import Any

from slotline.errors import ResultTimeout
from slotline.follow import Follower
from slotline.results import Result, outcome
from slotline.streams import TokenStream
from slotline.transport import Transport, job_path


class Job:
    """A job on the server. It holds no connection; `id` is all that is needed to find the job again."""

    def __init__(self, transport: Transport, job_id: str) -> None:
        self.id = job_id
        self._transport = transport

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def info(self) -> dict[str, Any]:
        """The job object as the server shows it now.

        Raises:
            ApiError: `job_not_found`, if there is no such job.
        """
        info: dict[str, Any] = self._transport.call("GET", job_path(self.id))
        return info

    def status(self) -> str:
        """`queued`, `running`, `completed`, `failed` or `cancelled`."""
        return str(self.info()["status"])

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the job, at most `timeout` seconds.

        Raises:
            ResultTimeout: it has not ended in time; it lives on.
            JobFailed, JobCancelled: it ended that way; the error has the text so far.
        """
        deadline = None if timeout is None else self._transport.clock() + timeout
        follower = Follower(self._transport, self.id)
        try:
            while (event := follower.next(deadline)).name not in ("done", "failed"):
                pass
        except TimeoutError:
            raise ResultTimeout(f"job {self.id} did not end within {timeout:g} s; it lives on", self.id) from None
        finally:
            follower.close()
        return outcome(event.json())

    def stream(self, timeout: float | None = 30, *, after: int = -1) -> TokenStream:
        """The job's tokens from the start, or those later than index `after`.

        Args:
            timeout: seconds to wait for each token, counted from the start of the job: queueing does not count.
            after: index of the last token already seen, for instance by an earlier run of your program.
        """
        return TokenStream(self._transport, self.id, timeout, after)

    def cancel(self) -> dict[str, Any]:
        """Cancel the job and return its object. A second time changes nothing.

        Raises:
            ApiError: `job_already_ended`, if it had completed or failed.
        """
        job: dict[str, Any] = self._transport.call("POST", f"{job_path(self.id)}/cancel")
        return job
