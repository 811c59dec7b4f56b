from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from worker.kv_cells import KvCells, Run


@dataclass(eq=False)
class Held:
    """A sequence, and beside it the cells it holds one by one, as the model has them."""

    runs: list[Run] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)


steps = st.lists(
    st.tuples(st.sampled_from(["grow", "share", "cut"]), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)),
    max_size=60,
)


@given(steps)
def test_cells_are_counted_as_if_each_were_known(work: list[tuple[str, int, int, int]]) -> None:
    kv, sequences, made = KvCells(), [Held() for _ in range(5)], 0
    for what, first, second, count in work:
        a, b = sequences[first], sequences[second]
        if what == "grow" and count:
            kv.grow(a, count)
            a.cells += range(made, made + count)
            made += count
        elif what == "cut" and count <= len(a.cells):
            kv.cut(a, count)
            del a.cells[count:]
        elif what == "share" and a is not b and count and count <= len(a.cells):
            kv.cut(b, 0)
            kv.share(a, b, count)
            b.cells = a.cells[:count]
        kv.check_integrity(sequences)
        assert kv.used == len({cell for s in sequences for cell in s.cells})
    for s in sequences:
        others = {cell for o in sequences if o is not s for cell in o.cells}
        own = len(s.cells) - max((i + 1 for i, cell in enumerate(s.cells) if cell in others), default=0)
        assert kv.own_tail(s) == own
    halves = [(s, len(s.cells) // 2) for s in sequences]
    assert kv.held(halves) == len({cell for s, half in halves for cell in s.cells[:half]})
