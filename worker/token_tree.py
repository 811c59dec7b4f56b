"""A vocabulary as a tree, in which all tokens that a grammar allows are found without testing every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from worker.token_choice import Ids


class TokenTree:
    """Each token below the longest other one that its text begins with.

    Where a grammar allows a text it allows every beginning of it, so nothing below a refused token is allowed.
    Vocabularies are mostly made by putting tokens together, so few tokens begin with no other.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Order the tokens by their texts; those without one are left out."""
        tokens = sorted(filter(pieces.__getitem__, range(len(pieces))), key=lambda token: len(pieces[token]))
        by_piece: dict[bytes, int] = {}
        parents: list[int] = []
        for token in tokens:
            piece = pieces[token]
            # Of tokens with the same text the others hang below the first.
            beginnings = (by_piece.get(piece[:size]) for size in range(len(piece), 0, -1))
            parents.append(next((parent for parent in beginnings if parent is not None), -1))
            by_piece.setdefault(piece, token)
        ids, above = np.array(tokens, np.intp), np.array(parents, np.intp)
        self._roots: Ids = ids[above < 0]
        # Those below one token stand together, from _first[token] to _first[token + 1].
        self._ids: Ids = ids[np.argsort(above, kind="stable")]
        self._first = np.searchsorted(np.sort(above), np.arange(len(pieces) + 1))

    def starts(self, named: Sequence[int] = ()) -> Ids:
        """Tokens, one of which is allowed wherever any is.

        Args:
            named: tokens that the grammar allows or refuses by their numbers, whatever their text is.
        """
        by_number = np.array(named, np.intp)
        return np.concatenate((self._roots, by_number, self._below(by_number)))

    def allowed(self, starts: Ids, among: Callable[[Ids], Ids]) -> Ids:
        """All tokens that are allowed, in no order; some may come twice.

        Args:
            among: which of the given tokens are allowed. It is called once for each level of the tree.
        """
        found, level = [starts[:0]], starts
        while len(level):
            found.append(among(level))
            level = self._below(found[-1])
        return np.concatenate(found)

    def _below(self, tokens: Ids) -> Ids:
        starts = self._first[tokens]
        sizes = self._first[tokens + 1] - starts
        ends = sizes.cumsum()
        places = np.arange(sizes.sum()) + np.repeat(starts - (ends - sizes), sizes)
        below: Ids = self._ids[places]
        return below
