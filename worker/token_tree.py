"""A vocabulary as a tree, in which all tokens that a grammar allows are found without testing every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]


class TokenTree:
    """Each token below the longest other one that its text begins with.

    Where a grammar allows a text it allows every beginning of it, so nothing below a refused token is allowed.
    Vocabularies are mostly made by putting tokens together, so few tokens begin with no other.

    Attributes:
        roots: the tokens that begin with no other; one of them is allowed wherever any token is.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        """Order tokens by their texts, none of which may be empty."""
        tokens = sorted(pieces, key=lambda token: len(pieces[token]))
        by_piece: dict[bytes, int] = {}
        parents: list[int] = []
        for token in tokens:
            piece = pieces[token]
            # Of tokens with the same text the others hang below the first.
            beginnings = (by_piece.get(piece[:size]) for size in range(len(piece), 0, -1))
            parents.append(next((parent for parent in beginnings if parent is not None), -1))
            by_piece.setdefault(piece, token)
        ids, above = np.array(tokens, np.intp), np.array(parents, np.intp)
        self.roots: Ids = ids[above < 0]
        # Brothers stand together: those below `token` from _first[token] to _first[token + 1].
        self._ids = ids[np.argsort(above, kind="stable")]
        self._first = np.searchsorted(np.sort(above), np.arange(max(tokens, default=-1) + 2))

    def allowed(self, among: Callable[[Ids], Ids]) -> Ids:
        """All tokens that are allowed, in no order.

        Args:
            among: which of the given tokens are allowed. It is called once for each level of the tree.
        """
        found = [among(self.roots)]
        while len(found[-1]):
            found.append(among(self._below(found[-1])))
        return np.concatenate(found)

    def _below(self, tokens: Ids) -> Ids:
        starts = self._first[tokens]
        sizes = self._first[tokens + 1] - starts
        ends = sizes.cumsum()
        places = np.arange(ends[-1]) + np.repeat(starts - (ends - sizes), sizes)
        return self._ids[places]
