"""A radix tree over tokens: which sequences begin with given tokens, and how far.

Each node covers a stretch of positions that all sequences below it have in common. It points into the token list of
one of them instead of copying, so splitting and joining nodes takes no time that grows with the tokens. The price is a
rule for callers: a token list that was handed in may grow at its end, and is otherwise replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class HasTokens(Protocol):
    """What the tree holds."""

    tokens: list[int]


H = TypeVar("H", bound=HasTokens)


class Node(Generic[H]):
    """Positions `start` to `stop` of every sequence below; `members` end here."""

    __slots__ = ("children", "members", "parent", "source", "start", "stop")

    def __init__(self, source: list[int], start: int, stop: int, parent: Node[H] | None) -> None:
        self.source, self.start, self.stop, self.parent = source, start, stop, parent
        self.children: dict[int, Node[H]] = {}
        self.members: dict[H, None] = {}

    @property
    def key(self) -> int:
        """The first token, by which the parent knows it."""
        return self.source[self.start]

    def holders(self) -> Iterator[H]:
        """All sequences that go through this node."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from node.members
            nodes += node.children.values()


class RadixTree(Generic[H]):
    """Sequences by their tokens. A step of `extend` takes the same time however long the sequences are."""

    def __init__(self) -> None:
        self._root: Node[H] = Node([], 0, 0, None)
        self._ends: dict[H, Node[H]] = {}

    def __contains__(self, holder: H) -> bool:
        return holder in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, holder: H) -> None:
        """Take in a sequence with all its tokens."""
        assert holder not in self._ends, "the sequence is in the tree already"
        node, depth = self._descend(holder.tokens)
        self._put(holder, node, depth)

    def extend(self, holder: H) -> None:
        """Note that the sequence's token list has grown by one."""
        node, tokens = self._ends[holder], holder.tokens
        assert len(tokens) == node.stop + 1, "a sequence grows one token at a time"
        if node is not self._root and not node.children and len(node.members) == 1:
            node.source, node.stop = tokens, len(tokens)
            return
        del node.members[holder]
        child = node.children.get(tokens[-1])
        if child is None:
            child = self._leaf(node, tokens)
        elif child.stop > len(tokens):
            child = self._split(child, len(tokens))
        child.members[holder] = None
        self._ends[holder] = child
        self._tidy(node)

    def cut(self, holder: H) -> None:
        """Note that the sequence has another token list now, which is a prefix of the former."""
        old, length = self._ends.pop(holder), len(holder.tokens)
        del old.members[holder]
        node = old
        while node.start >= length and node.parent is not None:
            node = node.parent
        if node.stop > length:
            node = self._split(node, length)
        node.members[holder] = None
        self._ends[holder] = node
        if node is not old:
            self._tidy(old)

    def remove(self, holder: H) -> None:
        """Let go of a sequence."""
        node = self._ends.pop(holder)
        del node.members[holder]
        self._tidy(node)

    def matches(self, tokens: list[int]) -> Iterator[tuple[int, H]]:
        """Sequences that begin as `tokens` do, and for how many tokens; the longest first, none with 0.

        The tree must not change while this is being used.
        """
        node, depth = self._descend(tokens)
        seen: Node[H] | None = None
        while node is not self._root:
            for holder in node.members:
                yield depth, holder
            for child in node.children.values():
                if child is not seen:
                    for holder in child.holders():
                        yield depth, holder
            assert node.parent is not None
            seen, depth, node = node, node.start, node.parent

    def longer(self, holder: H) -> Iterator[H]:
        """Other sequences that begin with all the tokens of this one."""
        return (other for other in self._ends[holder].holders() if other is not holder)

    def check_integrity(self) -> None:
        """Raise AssertionError where the tree contradicts itself or its sequences."""
        found: dict[H, Node[H]] = {}
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            assert node.parent is not None and node.parent.children[node.key] is node, "a node its parent does not know"
            assert node.start == node.parent.stop < node.stop <= len(node.source), "a node that covers no stretch"
            assert node.members or len(node.children) > 1, "a node that tells nothing apart"
            for holder in node.members:
                assert len(holder.tokens) == node.stop, "a sequence ends at another place than its node"
                found[holder] = node
            for holder in node.holders():
                stretch = slice(node.start, node.stop)
                assert holder.tokens[stretch] == node.source[stretch], "a sequence below a node with other tokens"
            nodes += node.children.values()
        found |= dict.fromkeys(self._root.members, self._root)
        assert found == self._ends, "the ends of sequences are not where they are noted"

    def _descend(self, tokens: list[int]) -> tuple[Node[H], int]:
        """The last node that begins as `tokens` go on, and how many tokens agree, which may be within it."""
        node, depth = self._root, 0
        while depth == node.stop and depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            node, depth = child, depth + _common(child.source, tokens, depth, min(child.stop, len(tokens)))
        return node, depth

    def _put(self, holder: H, node: Node[H], depth: int) -> None:
        if depth < node.stop:
            node = self._split(node, depth)
        if depth < len(holder.tokens):
            node = self._leaf(node, holder.tokens)
        node.members[holder] = None
        self._ends[holder] = node

    def _leaf(self, parent: Node[H], tokens: list[int]) -> Node[H]:
        leaf = Node(tokens, parent.stop, len(tokens), parent)
        parent.children[leaf.key] = leaf
        return leaf

    def _split(self, node: Node[H], at: int) -> Node[H]:
        """Divide a node at a position within it; returns the new first half."""
        assert node.parent is not None and node.start < at < node.stop
        first: Node[H] = Node(node.source, node.start, at, node.parent)
        node.parent.children[node.key] = first
        node.start, node.parent = at, first
        first.children[node.key] = node
        return first

    def _tidy(self, node: Node[H]) -> None:
        """Remove a node that nobody needs any more, and join one that tells nothing apart with what follows."""
        while node.parent is not None and not node.members and not node.children:
            del node.parent.children[node.key]
            node = node.parent
        if node.parent is not None and not node.members and len(node.children) == 1:
            (child,) = node.children.values()
            child.start, child.parent = node.start, node.parent
            node.parent.children[node.key] = child


def _common(a: list[int], b: list[int], start: int, stop: int) -> int:
    """How many places from `start` on, up to `stop`, are equal in both."""
    low, high = start, stop
    # Comparing slices is done in C; halving finds the place where they part.
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low - start
