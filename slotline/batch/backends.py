"""Which server runs the lines: the one that is named, a running `slotline up`, or one of our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slotline.batch.runner import Runner, RunnerLost
from slotline.home import named_url, running_state

#: How a model of the scripted backend begins, which needs no file.
SCRIPTED = "fake:"


@dataclass(frozen=True, slots=True)
class Server:
    """A server somewhere. `url` None means where a `Client` looks."""

    url: str | None
    model: str | None

    def model_name(self) -> str:
        """The name of the model that lines go to which name none.

        Raises:
            RunnerLost: there is none to be had.
        """
        from slotline.batch.http_runner import served_model
        from slotline.client import Client

        with Client(self.url) as client:
            return served_model(client, self.model)

    def open(self, say: Callable[[str], None]) -> Runner:
        """See `EmbeddedRunner` and `HttpRunner`.

        Raises:
            RunnerLost: it cannot be used.
        """
        from slotline.batch.http_runner import HttpRunner

        return HttpRunner(self.url, self.model)


@dataclass(frozen=True, slots=True)
class Embedded:
    """Processes of our own. `model_path` None means the demo model; `slots` is a number or `auto`."""

    model_path: str | None
    slots: int | str

    def model_name(self) -> str:
        """See `Server.model_name`. The worker's other settings are looked at too, before it is started."""
        from shared.settings import SettingsError
        from slotline.batch.embedded import worker_settings

        try:
            return worker_settings(self._path(), self.slots).model_name
        except SettingsError as error:
            raise RunnerLost(str(error)) from None

    def open(self, say: Callable[[str], None]) -> Runner:
        """See `Server.open`."""
        from slotline.batch.embedded import EmbeddedRunner

        if self.model_path is None:
            say("no --model given: using the demo model, SmolLM2-135M-Instruct")
        return EmbeddedRunner(self._path(), self.slots, say)

    def _path(self) -> str:
        from slotline.cli.bench import demo_model

        return self.model_path or demo_model()


Backend = Server | Embedded


def choose(base_url: str | None, model: str | None, slots: int | str | None) -> Backend:
    """Decide who runs the lines. `slots` None means that nobody asks for a worker of our own by their number.

    Raises:
        RunnerLost: what is asked for does not fit together.
    """
    own = slots is not None or (model is not None and _is_file(model))
    if base_url is not None and own:
        given = "--slots" if slots is not None else "a model file"
        raise RunnerLost(f"{given} is for a worker of our own, not for the server of --base-url")
    url = base_url or named_url()
    if not own and (url or running_state() is not None):
        return Server(url, model)
    if model is not None and not _is_file(model):
        raise RunnerLost(f"there is no model file {model!r}, and no server is named or running that could know it")
    return Embedded(model, slots or "auto")


def _is_file(model: str) -> bool:
    return model.startswith(SCRIPTED) or model.endswith(".gguf") or Path(model).is_file()
