"""A vocabulary as a tree, in which all tokens that a grammar allows are found without testing every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from worker.token_choice import Ids

#: Where no more tokens than this hang below one, all of them are tested in the same call. A call takes as long as
#: about a hundred tests.
_FEW = 64


class TokenTree:
    """Each token below the longest other one that its text begins with.

    Where a grammar allows a text it allows every beginning of it, so nothing below a refused token is allowed.
    Vocabularies are mostly made by putting tokens together, so few tokens begin with no other.

    Attributes:
        roots: the tokens that begin with no other; one of them is allowed wherever any is.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Order the tokens by their texts; those without one are left out."""
        tokens = np.array(sorted(filter(pieces.__getitem__, range(len(pieces))), key=pieces.__getitem__), np.intp)
        parents, sizes = _nested([pieces[token] for token in tokens])
        # After which token each is tested: the one it hangs below, or if that is one of few, the one they hang below.
        after: list[int] = []
        for parent in parents:
            is_among_few = parent >= 0 and parents[parent] >= 0 and sizes[parents[parent]] <= _FEW
            after.append(after[parent] if is_among_few else parent)
        previous = np.append(tokens, -1)[after]
        self.roots: Ids = tokens[previous < 0]
        # Those that come after one token stand together, from _first[token] to _first[token + 1].
        self._ids: Ids = tokens[np.argsort(previous, kind="stable")]
        self._first = np.searchsorted(np.sort(previous), np.arange(len(pieces) + 1))

    def allowed(self, among: Callable[[Ids], Ids]) -> Ids:
        """All tokens that are allowed, in no order.

        Args:
            among: which of the given tokens are allowed. It is called once for each level of the tree.
        """
        found, level = [self.roots[:0]], self.roots
        while len(level):
            found.append(among(level))
            level = self._next(found[-1])
        return np.concatenate(found)

    def _next(self, tokens: Ids) -> Ids:
        starts = self._first[tokens]
        sizes = self._first[tokens + 1] - starts
        ends = sizes.cumsum()
        places = np.arange(sizes.sum()) + np.repeat(starts - (ends - sizes), sizes)
        following: Ids = self._ids[places]
        return following


def _nested(texts: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """For each of the sorted texts the place of the longest that it begins with, or -1; and how many begin with it."""
    parents: list[int] = []
    sizes = [0] * len(texts)
    open_: list[int] = []
    for place, text in enumerate(texts):
        while open_ and not text.startswith(texts[open_[-1]]):
            open_.pop()
        parents.append(open_[-1] if open_ else -1)
        for above in open_:
            sizes[above] += 1
        open_.append(place)
    return parents, sizes
