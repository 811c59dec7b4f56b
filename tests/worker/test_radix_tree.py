from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from worker.radix_tree import RadixTree


@dataclass(eq=False)
class Text:
    tokens: list[int] = field(default_factory=list)


def tree_of(*tokens: list[int]) -> tuple[RadixTree[Text], list[Text]]:
    tree: RadixTree[Text] = RadixTree()
    texts = [Text(t) for t in tokens]
    for text in texts:
        tree.add(text)
        tree.check_integrity()
    return tree, texts


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_longest_prefix_comes_first() -> None:
    tree, (a, b, c) = tree_of([1, 2, 3, 4], [1, 2, 9], [7])
    assert list(tree.matches([1, 2, 3, 5])) == [(3, a), (2, b)]
    assert list(tree.matches([1, 2])) in ([(2, a), (2, b)], [(2, b), (2, a)])
    assert list(tree.matches([7, 8])) == [(1, c)]
    assert list(tree.matches([5])) == [] == list(tree.matches([]))


def test_sequences_that_go_the_same_way_share_a_node_until_they_part() -> None:
    tree, (a, b) = tree_of([1, 2], [1, 2])
    for token in (3, 4):
        for text in (a, b):
            text.tokens.append(token)
            tree.extend(text)
            tree.check_integrity()
    assert list(tree.longer(a)) == [b]
    b.tokens.append(5)
    tree.extend(b)
    assert list(tree.longer(a)) == [b] and list(tree.longer(b)) == []


def test_a_sequence_that_is_cut_short_leaves_the_others_as_they_are() -> None:
    tree, (a, b) = tree_of([1, 2, 3, 4], [1, 2, 3, 4, 5])
    a.tokens = a.tokens[:2]
    tree.cut(a)
    tree.check_integrity()
    assert list(tree.matches([1, 2, 3, 4, 5, 6])) == [(5, b), (2, a)]
    a.tokens.append(8)
    tree.extend(a)
    tree.check_integrity()
    assert next(tree.matches([1, 2, 8])) == (3, a)


few = st.lists(st.integers(0, 2), max_size=6)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "extend", "cut", "remove"]), st.integers(0, 5), few), max_size=40), few
)
def test_whatever_happens_it_finds_what_looking_at_every_sequence_finds(
    steps: list[tuple[str, int, list[int]]], wanted: list[int]
) -> None:
    tree: RadixTree[Text] = RadixTree()
    texts: list[Text] = []
    for what, number, tokens in steps:
        if what == "add" or not texts:
            texts.append(Text(list(tokens)))
            tree.add(texts[-1])
        elif what == "remove":
            tree.remove(texts.pop(number % len(texts)))
        elif what == "cut":
            text = texts[number % len(texts)]
            text.tokens = text.tokens[:number]
            tree.cut(text)
        else:
            text = texts[number % len(texts)]
            for token in tokens:
                text.tokens.append(token)
                tree.extend(text)
        tree.check_integrity()
        assert len(tree) == len(texts)
    found = list(tree.matches(wanted))
    assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)
    expected = {text: n for text in texts if (n := common(text.tokens, wanted))}
    assert {text: length for length, text in found} == expected and len(found) == len(expected)
    for text in texts:
        longer = [t for t in texts if t is not text and t.tokens[: len(text.tokens)] == text.tokens]
        assert set(tree.longer(text)) == set(longer)
