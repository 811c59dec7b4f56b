from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import token_tree
from worker.token_choice import Ids
from worker.token_tree import TokenTree

WORDS = st.lists(st.text("ab", max_size=6).map(str.encode), min_size=1, max_size=40)


def chosen(allowed: set[int], calls: list[int] | None = None) -> Callable[[Ids], Ids]:
    """A grammar that allows exactly these tokens."""

    def among(tokens: Ids) -> Ids:
        if calls is not None:
            calls.append(len(tokens))
        return np.array([token for token in tokens.tolist() if token in allowed], np.intp)

    return among


@pytest.mark.parametrize("few", [0, 3, 64])
@given(pieces=WORDS, texts=WORDS)
def test_all_allowed_tokens_are_found(few: int, pieces: list[bytes], texts: list[bytes]) -> None:
    """The grammar allows some texts and their beginnings."""
    allowed = {token for token, piece in enumerate(pieces) if piece and any(t.startswith(piece) for t in texts)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_tree, "_FEW", few)
        tree = TokenTree(pieces)
    found = tree.allowed(chosen(allowed))
    assert sorted(found.tolist()) == sorted(allowed)
    assert bool(allowed & set(tree.roots.tolist())) == bool(allowed)


def test_little_is_tested_where_little_is_allowed() -> None:
    """Of every text of up to three of ten letters, those that begin `abc`, and the four that hang below it."""
    letters = b"abcdefghij"
    words = [bytes([x, y, z][:size]) for size in (1, 2, 3) for x in letters for y in letters for z in letters]
    pieces = [*dict.fromkeys(words), b"abcxyz", b"abcx", b"abcxy", b"abcy"]
    allowed = {token for token, piece in enumerate(pieces) if b"abcxyz".startswith(piece)}
    calls: list[int] = []
    tree = TokenTree(pieces)
    assert set(tree.allowed(chosen(allowed, calls)).tolist()) == allowed
    # The letters; those below `a` are many, those below `ab` so few that they are tested at once.
    assert calls == [10, 10, 14]
