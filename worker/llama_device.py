"""What a model runs on: the devices of this build of llama.cpp, and those of the machine."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

from llama_cpp import _ggml

from worker.llama_native import ll

_ACCELERATORS = {1, 2}

_ggml_lib = ctypes.PyDLL(_ggml.libggml._name)
_dev_get = _ggml_lib.ggml_backend_dev_get
_dev_memory = _ggml_lib.ggml_backend_dev_memory
_dev_name = _ggml_lib.ggml_backend_dev_name
_dev_description = _ggml_lib.ggml_backend_dev_description
_dev_type = _ggml_lib.ggml_backend_dev_type
_ggml_lib.ggml_backend_dev_count.restype = ctypes.c_size_t
_dev_get.argtypes, _dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
_dev_memory.argtypes, _dev_memory.restype = [ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2], None
_dev_name.argtypes, _dev_name.restype = [ctypes.c_void_p], ctypes.c_char_p
_dev_description.argtypes, _dev_description.restype = [ctypes.c_void_p], ctypes.c_char_p
_dev_type.argtypes, _dev_type.restype = [ctypes.c_void_p], ctypes.c_int


def device_names(*, gpu: bool) -> list[str]:
    """What this build of llama.cpp calls its GPUs, or else its CPU."""
    return [_dev_description(d).decode(errors="replace").strip() for d in _devices(gpu=gpu)]


def free_gpu_memory() -> dict[str, int]:
    """Free bytes of each GPU, by the name that llama.cpp gives its buffers there."""
    found = {}
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for device in _devices(gpu=True):
        _dev_memory(device, free, total)
        found[_dev_name(device).decode()] = free.value
    return found


def _devices(*, gpu: bool) -> list[int]:
    devices = [_dev_get(i) for i in range(_ggml_lib.ggml_backend_dev_count())]
    return [device for device in devices if (_dev_type(device) in _ACCELERATORS) == gpu]


def unused_gpu_warning(n_gpu_layers: int) -> str | None:
    """How to mend that the machine has a GPU and this build of llama.cpp cannot use it; None if that is not so."""
    kind = _gpu_of_machine()
    if kind is None or n_gpu_layers == 0:
        return None
    if not ll.llama_supports_gpu_offload():
        return (
            f"this machine has a GPU but llama-cpp-python was built without it; run `make up GPU={kind}` to rebuild it"
        )
    if not device_names(gpu=True):
        return "this machine has a GPU but llama.cpp finds none it can use; check the driver and CUDA_VISIBLE_DEVICES"
    return None


def _gpu_of_machine() -> str | None:
    if Path("/dev/nvidia0").exists() or (Path("/dev/dxg").exists() and shutil.which("nvidia-smi")):
        return "cuda"
    if Path("/dev/kfd").exists():
        return "vulkan"
    return "metal" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else None
