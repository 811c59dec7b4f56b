"""What people import and type: the HTTP client and the `slotline` command.

    from slotline import Client

    with Client() as client:
        print(client.generate("The capital of France is").text)

It imports none of `shared`, `webapi` and `worker`, so it works inside a project that has packages of these
names. The client itself is loaded on first use: `slotline web` comes through here too, and must not have
imported an HTTP client, and `ssl` with it, before gevent has done its patching.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from slotline.client import Client
    from slotline.errors import (
        ApiError,
        ConnectionFailed,
        JobCancelled,
        JobError,
        JobFailed,
        ProtocolError,
        ResultTimeout,
        SlotlineClientError,
        StreamGap,
        StreamTimeout,
        WaitTimeout,
    )
    from slotline.job import Job
    from slotline.results import Result, Token
    from slotline.streams import TokenStream

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "Client",
    "ConnectionFailed",
    "Job",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "ProtocolError",
    "Result",
    "ResultTimeout",
    "SlotlineClientError",
    "StreamGap",
    "StreamTimeout",
    "Token",
    "TokenStream",
    "WaitTimeout",
    "__version__",
    "generate",
]

_HOMES = {"Client": "client", "Job": "job", "Result": "results", "Token": "results", "TokenStream": "streams"}


def generate(*args: Any, **kwargs: Any) -> NoReturn:
    """The function that every generation job on the queue names.

    A model cannot live in a process that is forked for each job, so a plain RQ worker is sent away.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "this job must be run by `slotline worker`, which holds the model and many jobs at once; "
        "a plain RQ worker (one process forked for each job) cannot. "
        "To generate from your own code use `from slotline import Client`."
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"slotline.{_HOMES.get(name, 'errors')}"), name)
