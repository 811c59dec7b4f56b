"""Embeddings as they are given out: of length 1, as base64."""

from __future__ import annotations

import base64

import numpy as np

from shared.errors import BadLogits
from worker.backend import Logits


def unit(vector: Logits) -> Logits:
    """The vector scaled to length 1, as float32 of its own.

    Raises:
        BadLogits: it holds no direction: not finite, or all zero.
    """
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length) or length == 0:
        raise BadLogits("the model computed no embedding for this job")
    return (vector / length).astype(np.float32)


def to_base64(vector: Logits) -> str:
    """Base64 of the numbers as little-endian 32-bit floats. Source: OpenAI's `encoding_format: base64`."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
