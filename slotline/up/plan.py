"""What `slotline up` is going to run, checked before anything is started."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slotline.cli.faults import BadSetup
from slotline.home import data_dir

if TYPE_CHECKING:
    from shared.settings import WebSettings, WorkerSettings

#: Stands for the demo model until its path is known.
DEMO = "demo.gguf"


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of web and worker, and where data is kept.

    `own_redis` says whether a server of our own is started; `fresh`, whether its data is emptied first;
    `demo`, whether the model is the demo model.
    """

    directory: Path
    web: WebSettings
    worker: WorkerSettings
    own_redis: bool
    demo: bool
    fresh: bool

    def environment(self, port: int, model_path: str, redis_url: str) -> dict[str, str]:
        """The variables that tell the children what the flags told us; the rest they read for themselves."""
        return {
            "SLOTLINE_HOST": self.web.host,
            "SLOTLINE_PORT": str(port),
            "SLOTLINE_REDIS_URL": redis_url,
            "SLOTLINE_MODEL_PATH": model_path,
            "SLOTLINE_N_CTX": str(self.worker.n_ctx),
            "SLOTLINE_N_PARALLEL": str(self.worker.n_parallel),
            "SLOTLINE_CACHE_PROMPT": str(self.worker.cache_prompt).lower(),
            "SLOTLINE_DATA_DIR": str(self.directory),
            "SLOTLINE_FILES_URL": self.files_url,
        }

    @property
    def own_files(self) -> Path | None:
        """The folder for files in our data directory; None where they are elsewhere."""
        return None if self.web.files_url else self.directory / "files"

    @property
    def files_url(self) -> str:
        """Where files and batch results are."""
        return self.web.files_url or str(self.own_files)

    def url(self, port: int) -> str:
        """The address to type: a server that listens everywhere is also on this machine's own."""
        given = self.web.host.strip("[]")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(given, given)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def make_plan(
    host: str | None,
    port: str | None,
    model: str | None,
    slots: str | None,
    redis_url: str | None,
    directory: Path | None,
    fresh: bool,
) -> Plan:
    """Check the flags and the environment.

    Raises:
        BadSetup: something is wrong with them, a line each, or the model's library is not installed.
    """
    from shared.settings import FAKE_PREFIX, BatchSettings, SettingsError, WebSettings, load

    try:
        load(BatchSettings)  # its own process reads them
        web = load(WebSettings, {"host": host, "port": port, "redis_url": redis_url})
        given = {"model_path": model, "n_parallel": slots, "redis_url": web.redis_url}
        worker = _worker(given)
    except SettingsError as error:
        spelled = str(error).replace("--model-path", "--model").replace("--n-parallel", "--slots")
        raise BadSetup(spelled) from None
    own_redis = "redis_url" not in web.model_fields_set
    if fresh and not own_redis:
        raise BadSetup("--fresh empties only a server of our own: leave out --redis-url and SLOTLINE_REDIS_URL")
    if not worker.model_path.startswith(FAKE_PREFIX) and find_spec("llama_cpp") is None:
        raise BadSetup("llama-cpp-python is not installed: pip install 'slotline[demo]', or try --model fake:echo")
    _check_model(worker)
    where = (directory or data_dir()).expanduser().resolve()
    return Plan(where, web, worker, own_redis, demo=worker.model_path == DEMO, fresh=fresh)


def _check_model(worker: WorkerSettings) -> None:
    """See to it that the model is one, before anything is started for it."""
    from shared.settings import FAKE_PREFIX
    from worker.backend import ModelError
    from worker.fake_backend import FakeBackend
    from worker.model_file import checked_file

    try:
        if worker.model_path.startswith(FAKE_PREFIX):
            FakeBackend.from_settings(worker).close()
        elif worker.model_path != DEMO:
            checked_file(worker.model_path)
    except ModelError as error:
        raise BadSetup(str(error).replace("set model_path to", "set --model to")) from None


def _worker(given: dict[str, str | None]) -> WorkerSettings:
    """The worker's settings, for a model that may be any: sized to it and to the machine, unless a variable says."""
    from shared.settings import WorkerSettings, load

    return load(
        WorkerSettings, given, otherwise={"model_path": DEMO, "n_ctx": 0, "n_parallel": "auto", "cache_prompt": True}
    )


def free_port(host: str, port: int) -> int:
    """Check that the address is ours to take; port 0 becomes a free one.

    Raises:
        BadSetup: it is not; the message says what to do.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As the web server does: a port whose last connections are only fading away is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise BadSetup(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"port {port} of {host} is taken: stop what listens there, or choose another with --port"
        elif error.errno == errno.EACCES:
            advice = f"port {port} is for the administrator only: choose one above 1023 with --port"
        else:
            advice = f"cannot listen on {host} port {port}: {error.strerror}"
        raise BadSetup(advice) from None
