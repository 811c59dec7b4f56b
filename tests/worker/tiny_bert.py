"""A BERT of 80 thousand random numbers: what an embedding model without a KV cache is to llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.worker.gguf_file import write_gguf

WIDTH, INNER, LAYERS, CONTEXT = 64, 128, 2, 128
CLS, SEP = 2, 3
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581{c}" for c in LETTERS), *LETTERS]

_METADATA: dict[str, Any] = {
    "general.architecture": "bert",
    "bert.context_length": CONTEXT,
    "bert.embedding_length": WIDTH,
    "bert.feed_forward_length": INNER,
    "bert.block_count": LAYERS,
    "bert.attention.head_count": 4,
    "bert.attention.layer_norm_epsilon": 1e-12,
    "bert.attention.causal": False,
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * 5 + [1] * 2 * len(LETTERS),
    "tokenizer.ggml.token_type_count": 2,
    "tokenizer.ggml.bos_token_id": CLS,
    "tokenizer.ggml.seperator_token_id": SEP,
    "tokenizer.ggml.unknown_token_id": 1,
    "tokenizer.ggml.padding_token_id": 0,
}


def write_tiny_bert(path: Path) -> Path:
    """Write the model as a GGUF file."""
    return write_gguf(path, _METADATA, _tensors())


def _tensors() -> dict[str, npt.NDArray[np.float32]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (CONTEXT, WIDTH),
    }
    norms = ["token_embd_norm"]
    for block in (f"blk.{i}" for i in range(LAYERS)):
        norms += [f"{block}.attn_output_norm", f"{block}.layer_output_norm"]
        square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
        for name, shape in {**square, "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
    for norm in norms:
        shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    draw = np.random.default_rng(0)
    return {
        name: (draw.normal(0, 0.1, shape) + ("norm.weight" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }
