"""A first look over the whole input, and the lines of it that are left to run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from slotline.batch.index import LineIndex
from slotline.batch.lines import Line, LineReader, content_hash
from slotline.batch.problems import BadInput, Problem, Problems
from slotline.batch.rows import given_back

NO_LINES = Problem(None, "the input has no lines")


def survey(reader: LineReader, index: LineIndex, limit: int | None = None) -> tuple[int, int]:
    """Check the structure of every line and note the ids.

    Returns how many of the first `limit` lines there are, and the number of the last of these.

    Raises:
        BadInput: names the broken lines.
    """
    problems, total, last = Problems(), 0, 0
    for line in reader:
        found = line if isinstance(line, Problem) else _repeated(line, index)
        if found is not None:
            problems.add(found)
        if isinstance(line, Line) and (limit is None or total < limit):
            total, last = total + 1, line.number
    problems.check()
    if not total:
        raise BadInput([NO_LINES])
    return total, last


def lines_left(reader: LineReader, index: LineIndex, limit: int | None, *, surveyed: bool) -> Iterator[Line]:
    """Those of the first `limit` lines that have no row yet.

    Raises:
        BadInput: the input is broken, if it was not surveyed, or is not the one that rows were made of.
    """
    line: Line | Problem | None = None
    for line in islice(reader, limit):
        problem = line if isinstance(line, Problem) else None
        if problem is None and not surveyed:
            assert isinstance(line, Line)
            problem = _repeated(line, index)
        if problem is not None:
            raise BadInput([problem])
        assert isinstance(line, Line)
        done = index.done(line.number)
        if done is None:
            yield line
        elif done and done != content_hash(given_back(line.fields)):
            raise BadInput([Problem(line.number, "its row in the output was made of another content")])
    if line is None:
        raise BadInput([NO_LINES])


def _repeated(line: Line, index: LineIndex) -> Problem | None:
    if line.custom_id is None:
        return None
    first = index.add_id(line.custom_id, line.number)
    return None if first is None else Problem(line.number, f"has the `custom_id` of line {first}, {line.custom_id!r}")
