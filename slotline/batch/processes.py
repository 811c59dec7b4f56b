"""The embedded Valkey and worker as the run sees them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from slotline.batch.runner import RunnerLost

#: The keeper stops the worker within its own limit; this is for what goes wrong beyond that.
CLOSE_S = 20.0

#: Of the worker's output, so much is looked through for what it said last.
TAIL_BYTES = 4096


class Processes:
    """A Valkey and a worker of our own, which end when they are closed, and when this process ends in any way.

    Attributes:
        redis_url: where Valkey is.

    Raises:
        RunnerLost: they could not be started.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "slotline", "batch", "keep"],
            env={**os.environ, **env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # A session of its own: Ctrl-C in the terminal is for the run alone.
            start_new_session=True,
        )
        self._where: dict[str, Any] = {}
        try:
            self.redis_url = self._read_where()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Make sure that all is running.

        Raises:
            RunnerLost: it is not; the message is what the worker said last.
        """
        status = self._keeper.poll()
        if status is not None and status < 0:
            raise RunnerLost(f"the process that kept Valkey and the worker was ended by signal {-status}")
        if status is not None:
            raise RunnerLost(self.last_words())

    def last_words(self) -> str:
        """The last line that was written by worker or keeper."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - TAIL_BYTES))
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        said = (line.strip().removeprefix("slotline: ") for line in reversed(lines) if line.strip())
        return next(said, "the worker ended without a word")

    def close(self) -> None:
        """Stop everything. A second call does nothing."""
        if self._log.closed:
            return
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.returncode < 0:
            self._end_orphans()
        self._keeper.stdout.close()
        self._log.close()

    def _read_where(self) -> str:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            self._keeper.wait()
            raise RunnerLost(self.last_words())
        self._where = json.loads(line)
        return str(self._where["redis_url"])

    def _end_orphans(self) -> None:
        """The keeper was killed: what it kept is left to us."""
        from slotline.up.keeper import end_worker

        if self._where:
            end_worker(self._where["folder"])
            with suppress(ProcessLookupError):
                os.kill(self._where["valkey"], signal.SIGKILL)
            shutil.rmtree(self._where["folder"], ignore_errors=True)
