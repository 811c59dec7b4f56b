"""Writing small models as GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[np.float32]]) -> Path:
    """Write a model. Source of the layout: llama.cpp, `ggml/include/gguf.h`."""
    infos, data = b"", b""
    for name, values in tensors.items():
        sizes = values.shape[::-1]
        infos += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, len(data))
        data += values.tobytes() + b"\0" * (-values.nbytes % 32)
    pairs = b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + pairs + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    """A value behind the number of its type: 4 uint32, 5 int32, 6 float32, 7 bool, 8 string, 9 array."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind = 8 if isinstance(value[0], str) else 5
    items = [_text(item) if kind == 8 else struct.pack("<i", item) for item in value]
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)
