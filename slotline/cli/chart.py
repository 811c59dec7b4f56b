"""A chart in plain characters, for any terminal and any pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log


@dataclass(frozen=True, slots=True)
class Mark:
    """Something at a place of the chart, shown as its label."""

    x: float
    y: float
    label: str


def scatter(marks: Sequence[Mark], x_name: str, y_name: str, width: int = 64, height: int = 14) -> list[str]:
    """Lines of a chart: `y` from 0 to the largest, `x` on a logarithmic scale from the smallest to the largest.

    Where two labels would lie on each other, the later one moves right.
    """
    low, high = min(mark.x for mark in marks), max(mark.x for mark in marks)
    top = max(mark.y for mark in marks)
    rows = [[" "] * width for _ in range(height)]
    for mark in marks:
        share = log(mark.x / low) / log(high / low) if high > low else 0.0
        row = rows[height - 1 - round((height - 1) * mark.y / top)]
        column = round(share * (width - len(mark.label)))
        while any(cell != " " for cell in row[max(0, column - 1) : column + len(mark.label)]):
            column += 1
        row[column : column + len(mark.label)] = mark.label
    ticks = [f"{top:.0f}", *[""] * (height - 2), "0"]
    ticks[(height - 1) // 2] = f"{top * (height - 1 - (height - 1) // 2) / (height - 1):.0f}"
    margin = max(map(len, ticks))
    return [
        y_name,
        *(f"{tick:>{margin}} |{''.join(row).rstrip()}" for tick, row in zip(ticks, rows, strict=True)),
        f"{'':{margin}} +{'-' * width}",
        f"{'':{margin}}  {_number(low)}{_number(high):>{width - len(_number(low))}}",
        f"{'':{margin}}  {x_name:>{width}}",
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
