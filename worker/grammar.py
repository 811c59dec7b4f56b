"""Grammars: our limits on GBNF text, then llama.cpp's own compiler."""

from __future__ import annotations

from typing import Any

from shared.errors import InvalidGrammar
from worker.llama_native import collected_log, first_error, quick

_init_grammar = quick("llama_sampler_init_grammar")


def compile_grammar(vocab: Any, grammar: str, root: str) -> Any:
    """A grammar sampler of llama.cpp, to be freed by the caller.

    Raises:
        InvalidGrammar: the grammar does not parse or is beyond our limits.
    """
    with collected_log() as lines:
        sampler = _init_grammar(vocab, grammar.encode(), root.encode())
    if not sampler:
        raise InvalidGrammar(f"the grammar does not compile: {first_error(lines)}", "grammar")
    return sampler
