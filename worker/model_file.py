"""The first look at a model file, which needs no llama.cpp."""

from __future__ import annotations

from pathlib import Path

from worker.backend import ModelError


def checked_file(model_path: str) -> Path:
    """The path of a GGUF file.

    Raises:
        ModelError: it is none, or cannot be read.
    """
    path = Path(model_path).expanduser()
    if not path.exists():
        raise ModelError(f"the model file {path} does not exist; set model_path to a GGUF file, or to fake:echo")
    if not path.is_file():
        raise ModelError(f"{path} is not a file; set model_path to the GGUF file itself")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"the model file {path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file; convert the model to GGUF, or download it again")
    return path
