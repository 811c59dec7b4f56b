"""The servers that are measured, each started on a free port of the loopback address and ended with its children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import Any, Self

#: A large model takes a while to load.
START_S = 180.0
STOP_S = 60.0


class Server:
    """A server process in a session of its own. Its output is in `log`, which vanishes with it."""

    def __init__(self, name: str, command: Sequence[str], url: str, env: Mapping[str, str]) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: it ended or did not answer in time; the message has the end of its output.
        """
        self.name = name
        self.url = url
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, and what it has started, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()

    def is_ready(self) -> bool:
        """Whether it serves its model."""
        return "data" in (_get(f"{self.url}/health") and _get(f"{self.url}/v1/models") or {})

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                words = self.log.read().decode("utf-8", "replace")[-2000:]
                raise RuntimeError(f"{self.name} does not answer at {self.url}:\n{words}")
            time.sleep(0.2)


class LlamaServer(Server):
    """llama.cpp's own server."""

    def __init__(
        self,
        model: str,
        slots: int,
        n_ctx: int,
        threads: int,
        binary: Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        command = [str(binary), "-m", model, "-np", str(slots), "-c", str(n_ctx), "-t", str(threads), *flags]
        super().__init__(
            "llama-server",
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            f"http://127.0.0.1:{port}",
            env or {},
        )


class Slotline(Server):
    """All of Slotline as `slotline up` starts it, on an empty data directory of its own."""

    def __init__(self, model: str, slots: int, n_ctx: int, threads: int, settings: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slotline-bench-")
        port = free_port()
        command = [sys.executable, "-P", "-m", "slotline", "up", "--host", "127.0.0.1", "--port", str(port)]
        env = {"SLOTLINE_N_CTX": str(n_ctx), "SLOTLINE_THREADS": str(threads), **settings}
        super().__init__(
            "slotline",
            [*command, "--model", model, "--slots", str(slots), "--data-dir", self._folder.name],
            f"http://127.0.0.1:{port}",
            env,
        )

    def is_ready(self) -> bool:
        """Whether a worker has registered its model."""
        return bool((_get(f"{self.url}/v1/stats") or {}).get("workers"))

    @property
    def redis_url(self) -> str:
        """Its Valkey."""
        return str(json.loads((Path(self._folder.name) / "up.json").read_text())["redis_url"])

    def close(self) -> None:
        """End it and remove its data."""
        super().close()
        self._folder.cleanup()


def end_on_signal() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that the servers end with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def model_path(name: str) -> str:
    """A model as given, or the file of `demo`, which is made on first use."""
    if name != "demo":
        return name
    from slotline.cli.bench import demo_model

    return demo_model()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str) -> dict[str, Any] | None:
    """What an address answers; None where it does not answer well."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError):
        return None
