"""The check of a batch's whole input before anything is run."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, BinaryIO

from shared.batches.lines import Line, LineError, RawLine, parse_line, read_raw
from shared.errors import UnknownModel
from shared.settings import BatchSettings

#: Most errors that a failed batch lists.
MAX_ERRORS = 100

#: Hashes are looked through in portions of about so many.
PORTION = 10_000


@dataclass(slots=True)
class Checked:
    """What a check has found. `model` is the resolved name; with errors, `total` need not be all."""

    total: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)

    @property
    def is_hopeless(self) -> bool:
        """Whether there are as many errors as are listed, so that more need not be looked for."""
        return len(self.errors) >= MAX_ERRORS

    def to_dicts(self) -> list[dict[str, Any]]:
        """The errors for `errors.data` of a batch, by line, and a note where the check has stopped at them."""
        listed = sorted(self.errors, key=lambda error: error.line or 0)[:MAX_ERRORS]
        if self.is_hopeless:
            listed.append(LineError("too_many_errors", f"the check has stopped at {MAX_ERRORS} errors"))
        return [error.to_dict() for error in listed]


class InputCheck:
    """Checks the structure of a whole input. Memory: eight bytes a line.

    Args:
        endpoint: what each line's `url` has to be.
        settings: the limits.
        resolve: the name of the model that a line's `model` means; raises UnknownModel.
        on_line: called for each line, so that a caller can stop the check by raising.
    """

    def __init__(
        self,
        endpoint: str,
        settings: BatchSettings,
        resolve: Callable[[str | None], str],
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._max_bytes = settings.batch_max_line_bytes
        self._max_lines = settings.batch_max_lines
        self._resolve = resolve
        self._on_line = on_line
        self._first: tuple[str | None, str] | None = None

    def run(self, open_input: Callable[[], BinaryIO]) -> Checked:
        """Read the input, a second time only where two lines may have the same `custom_id`."""
        checked, hashes = Checked(), array("Q")
        with open_input() as stream:
            for raw in self._lines(stream, checked):
                if raw.index == self._max_lines:
                    checked.errors.append(
                        LineError("too_many_tasks", f"there are more than {self._max_lines} requests")
                    )
                    break
                self._look_at(raw, checked, hashes)
        suspects = repeated(hashes)
        if suspects and not checked.is_hopeless:
            with open_input() as stream:
                self._find_duplicates(stream, suspects, checked)
        if not checked.total:
            checked.errors.append(LineError("empty_file", "the input has no requests"))
        return checked

    def _lines(self, stream: BinaryIO, checked: Checked) -> Iterator[RawLine]:
        for raw in read_raw(stream, self._max_bytes):
            self._on_line()
            if checked.is_hopeless:
                return
            yield raw

    def _look_at(self, raw: RawLine, checked: Checked, hashes: array[int]) -> None:
        checked.total += 1
        try:
            line = parse_line(raw, self._max_bytes)
            hashes.append(_hash(line.custom_id))
            self._check(line, checked)
        except LineError as error:
            error.line = raw.number
            checked.errors.append(error)

    def _check(self, line: Line, checked: Checked) -> None:
        if line.url != self._endpoint:
            raise LineError("url_mismatch", f"`url` is not the batch's endpoint, {self._endpoint}", "url")
        named = line.body.get("model")
        if self._first is not None and self._first[0] == named:
            return
        try:
            model = self._resolve(named)
        except UnknownModel as error:
            raise LineError(error.code, error.message, "body.model") from None
        if self._first is None:
            self._first = (named, model)
            checked.model = model
        elif model != self._first[1]:
            raise LineError(
                "model_mismatch", f"`model` means {model}, that of earlier lines {self._first[1]}", "body.model"
            )

    def _find_duplicates(self, stream: BinaryIO, suspects: frozenset[int], checked: Checked) -> None:
        seen: dict[str, int] = {}
        for raw in self._lines(stream, checked):
            try:
                line = parse_line(raw, self._max_bytes)
            except LineError:
                continue  # noted when it was read first
            if _hash(line.custom_id) not in suspects:
                continue
            first = seen.setdefault(line.custom_id, line.number)
            if first != line.number:
                message = f"`custom_id` is that of line {first} too"
                checked.errors.append(LineError("duplicate_custom_id", message, "custom_id", line.number))


def _hash(custom_id: str) -> int:
    return int.from_bytes(blake2b(custom_id.encode(), digest_size=8).digest(), "little")


def repeated(hashes: Sequence[int]) -> frozenset[int]:
    """The values that come more than once. Portion by portion, as a set of all of them would be large."""
    portions = len(hashes) // PORTION + 1
    found: set[int] = set()
    for portion in range(portions):
        counts = Counter(value for value in hashes if value % portions == portion)
        found.update(value for value, count in counts.items() if count > 1)
    return frozenset(found)
