"""The model process: loads the model once, then works until told to stop."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time

from shared.ask import answer, next_question
from shared.connection import connect, wait_until_up
from shared.errors import ChatTemplateError, InvalidGrammar, RedisUnavailable
from shared.registry import ModelCard, Registry
from shared.settings import FAKE_PREFIX, WorkerSettings
from worker.backend import Backend, ModelError
from worker.batching import BatchStrategy, WholePrompts, load_strategy
from worker.black_box import BlackBox
from worker.engine import Engine
from worker.intake import Intake
from worker.slot_worker import SlotWorker

log = logging.getLogger("slotline.worker")

EXIT_DRAINED = 0
EXIT_CONFIG = 2
EXIT_REDIS = 69  # EX_UNAVAILABLE of sysexits.h
EXIT_ENGINE = 70  # EX_SOFTWARE


def run(settings: WorkerSettings, parent_pid: int, box: BlackBox) -> int:
    """Serve one model for as long as the process `parent_pid` is our parent, which reads `box`.

    Returns the exit status.
    """
    configure_logging(settings.log_level)
    # The engine comes back from each pass for the GIL; another thread may keep it for no longer than this.
    sys.setswitchinterval(0.001)
    client = connect(settings)
    try:
        strategy = _strategy(settings)
        wait_until_up(client, settings.redis_wait_s, warn=False)  # our parent has
        backend = load_backend(settings)
    except RedisUnavailable as error:
        return _give_up(str(error), EXIT_REDIS)
    except (ModelError, ValueError) as error:
        return _give_up(str(error), EXIT_CONFIG)
    try:
        intake = Intake(settings, backend.info, backend.vocab)
    except (ChatTemplateError, OSError) as error:
        backend.close()
        return _give_up(f"--chat-template: {error}", EXIT_CONFIG)
    except InvalidGrammar as error:
        backend.close()
        return _give_up(f"--grammar: {error}", EXIT_CONFIG)
    name = f"{settings.model_name}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    box.sign(name)
    worker = SlotWorker(name, settings, client, intake, backend.info.n_ctx, parent_pid)
    engine = Engine(
        backend,
        strategy,
        worker.emit,
        name=name,
        chunk_size=settings.chunk_size,
        pause_s=settings.pause_s,
        box=box,
    )
    Registry(client).register_model(_card(settings, backend, intake))
    log.info(start_line(settings, backend))
    if backend.info.warning:
        log.warning(backend.info.warning)
    asked = Answering(settings, intake)
    asked.start()
    try:
        worker.run(engine)
    finally:
        asked.stop()
        backend.close()
    return EXIT_ENGINE if worker.engine_failed else EXIT_DRAINED


def _strategy(settings: WorkerSettings) -> BatchStrategy:
    if settings.pooling != "none":
        return WholePrompts()
    return load_strategy(settings.batch_strategy, settings.itl_target_ms)


def load_backend(settings: WorkerSettings, most_slots: int | None = None) -> Backend:
    """The backend a model path asks for.

    Args:
        most_slots: no more than that with `n_parallel auto`; left out, as many as are of use.

    Raises:
        ModelError: it cannot be loaded as configured.
    """
    if settings.model_path.startswith(FAKE_PREFIX):
        from worker.fake_backend import FakeBackend

        return FakeBackend.from_settings(settings, most_slots)
    try:
        from worker.llama_backend import LlamaBackend
    except ImportError as error:
        raise ModelError(f"llama-cpp-python is not installed ({error}); try pip install 'slotline[worker]'") from None
    return LlamaBackend(settings, most_slots)


class Answering:
    """Answers the web side's questions, on a thread and a Redis connection of its own."""

    def __init__(self, settings: WorkerSettings, intake: Intake) -> None:
        self._client = connect(settings)
        self._model = settings.model_name
        self._intake = intake
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answering")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the question at hand."""
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                question = next_question(self._client, self._model, wait_s=0.5)
                if question is not None:
                    answer(self._client, question, self._intake.answer(question))
            except Exception as error:
                log.warning("a question was not answered: %s: %s", type(error).__name__, error)
                self._stopping.wait(0.5)


def start_line(settings: WorkerSettings, backend: Backend) -> str:
    """What is served, on what, and how much of it fits."""
    info = backend.info
    return (
        f"serving {settings.model_name} ({info.description}) on {info.device}, "
        f"{info.layers_offloaded}/{info.layers} layers offloaded, n_ctx {info.n_ctx}, {info.n_parallel} slots, "
        f"at most {info.max_request_tokens} tokens per request, KV cache {info.kv_bytes / 2**20:.0f} MiB"
    )


def configure_logging(level: str) -> None:
    """One line a record, on standard error."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("rq.worker").setLevel("WARNING")
    logging.Formatter.converter = time.gmtime


def _card(settings: WorkerSettings, backend: Backend, intake: Intake) -> ModelCard:
    return ModelCard(
        name=settings.model_name,
        alias=settings.alias,
        n_ctx=backend.info.n_ctx,
        n_vocab=backend.vocab.n_tokens,
        max_request_tokens=backend.info.max_request_tokens,
        has_chat_template=intake.template is not None,
        max_queue=settings.max_queue,
        description=backend.info.description,
        capabilities=tuple(intake.capabilities),
        n_embd=backend.info.n_embd,
        max_tokens_cap=settings.max_tokens_cap,
    )


def _give_up(message: str, status: int) -> int:
    print(f"slotline worker: {message}", file=sys.stderr)
    return status
