"""Models of some thousand random numbers, one for each kind of memory that llama.cpp has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.worker.gguf_file import write_gguf
from tests.worker.tiny_bert import CLS, SEP, TOKENS

WIDTH, HEADS, INNER, CONTEXT, WINDOW = 32, 2, 64, 512, 24
STATE, KERNEL, RANK = 8, 4, 4

_VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(TOKENS) - 5),
    "tokenizer.ggml.token_type_count": 2,
    "tokenizer.ggml.bos_token_id": CLS,
    "tokenizer.ggml.eos_token_id": SEP,
    "tokenizer.ggml.unknown_token_id": 1,
}
_ATTENTION = {
    "attn_q.weight": (WIDTH, WIDTH),
    "attn_k.weight": (WIDTH, WIDTH),
    "attn_v.weight": (WIDTH, WIDTH),
    "attn_output.weight": (WIDTH, WIDTH),
}
_FEED_FORWARD = {
    "ffn_norm.weight": (WIDTH,),
    "ffn_gate.weight": (INNER, WIDTH),
    "ffn_up.weight": (INNER, WIDTH),
    "ffn_down.weight": (WIDTH, INNER),
}
_STATE_SPACE = {
    "ssm_in.weight": (4 * WIDTH, WIDTH),
    "ssm_conv1d.weight": (2 * WIDTH, KERNEL),
    "ssm_conv1d.bias": (2 * WIDTH,),
    "ssm_x.weight": (RANK + 2 * STATE, 2 * WIDTH),
    "ssm_dt.weight": (2 * WIDTH, RANK),
    "ssm_dt.bias": (2 * WIDTH,),
    "ssm_a": (2 * WIDTH, STATE),
    "ssm_d": (2 * WIDTH,),
    "ssm_out.weight": (WIDTH, 2 * WIDTH),
}
_NORMS_OF_STATES = {"ssm_dt_norm.weight": (RANK,), "ssm_b_norm.weight": (STATE,), "ssm_c_norm.weight": (STATE,)}
_NORM = {"attn_norm.weight": (WIDTH,)}
_POST_NORMS = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}

#: What each layer is made of.
_LAYERS: dict[str, list[dict[str, tuple[int, ...]]]] = {
    # Every second layer looks at the last WINDOW tokens only.
    "gemma2": [_NORM | _ATTENTION | _FEED_FORWARD | _POST_NORMS] * 2,
    "mamba": [_NORM | _STATE_SPACE] * 2,
    "jamba": [_NORM | _STATE_SPACE | _NORMS_OF_STATES | _FEED_FORWARD, _NORM | _ATTENTION | _FEED_FORWARD],
}
_OF_STATES = {
    "ssm.conv_kernel": KERNEL,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": RANK,
}
_METADATA: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.sliding_window": WINDOW, "attention.head_count": HEADS, "attention.head_count_kv": HEADS},
    "mamba": {**_OF_STATES, "attention.head_count": 0},
    "jamba": {**_OF_STATES, "attention.head_count": HEADS, "attention.head_count_kv": [0, HEADS]},
}


def write_tiny_model(path: Path, kind: str) -> Path:
    """Write a model with sliding windows (`gemma2`), of states (`mamba`) or of both states and attention (`jamba`)."""
    given = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "block_count": len(_LAYERS[kind]),
        "attention.layer_norm_rms_epsilon": 1e-6,
        **_METADATA[kind],
    }
    metadata = {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in given.items()}
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for number, parts in enumerate(_LAYERS[kind]):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in parts.items()}
    draw = np.random.default_rng(0)
    tensors = {
        name: (draw.normal(0, 0.3, shape) + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()
    }
    for name, values in tensors.items():
        if name.endswith("ssm_a"):
            np.negative(np.abs(values), out=values)  # states decay
    return write_gguf(path, metadata | _VOCABULARY, tensors)
