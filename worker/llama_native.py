"""The llama.cpp library: its functions called cheaply, and of its log only what is an error.

`ctypes.CDLL` gives the GIL away around each call, which `llama_decode` needs. For a call of a microsecond that is a
loss: with another busy thread 50 µs instead of 0.5. `quick` calls keep the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Both are read once, when the library is loaded. An aborting process must not start a debugger to print a backtrace.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# OpenMP threads that wait spin for milliseconds by default. With one more busy process on two cores that left 3 to 20
# tokens/s of 130; after a short spin they sleep, which left 50. If it is too short, they sleep at every barrier.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from llama_cpp import llama_cpp as ll  # noqa: E402

__all__ = ["collected_log", "first_error", "ll", "quick", "slow"]

log = logging.getLogger("slotline.llama")

_LOG_ERROR, _LOG_CONTINUED = 4, 5

_lib = ll._lib
_quick_lib = ctypes.PyDLL(_lib._name)
_local = threading.local()


def quick(name: str, restype: Any = ...) -> Callable[..., Any]:
    """A function of the library that keeps the GIL: for calls that take microseconds and never wait."""
    known, function = getattr(_lib, name), getattr(_quick_lib, name)
    function.argtypes = known.argtypes
    function.restype = known.restype if restype is ... else restype
    return function  # type: ignore[no-any-return]


def slow(name: str) -> Callable[..., Any]:
    """A function of the library that gives the GIL away."""
    return getattr(_lib, name)  # type: ignore[no-any-return]


@contextmanager
def collected_log() -> Iterator[list[tuple[int, str]]]:
    """The (level, line) pairs that the library logs on this thread meanwhile. One may be inside another."""
    lines: list[tuple[int, str]] = []
    outer = getattr(_local, "lines", None)
    _local.lines = lines
    try:
        yield lines
    finally:
        _local.lines = outer


def first_error(lines: list[tuple[int, str]]) -> str:
    """The first error among log lines, without the name of the function that wrote it."""
    text = next((line for level, line in lines if level == _LOG_ERROR), "llama.cpp gave no reason")
    head, _, tail = text.partition(": ")
    return " ".join((tail if tail and " " not in head else text).split())


@ll.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _user_data: object) -> None:
    lines = getattr(_local, "lines", None)
    line = text.decode(errors="replace").strip()
    if lines is not None and level != _LOG_CONTINUED:
        lines.append((level, line))
    elif lines is None and level == _LOG_ERROR:
        log.error("%s", line)


ll.llama_log_set(_log, None)
ll.llama_backend_init()
