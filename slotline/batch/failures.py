"""When so many lines have failed that going on makes no sense."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

#: Lines that have to end before a share of them says anything.
ENOUGH = 50


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """Stop when more than `count` lines, or more than `share` of those that ended, have failed.

    A share counts from `ENOUGH` lines on. With neither, only a run whose first `ENOUGH` lines all fail is stopped.
    """

    count: float = math.inf
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> FailureLimit:
        """Read `N` or `P%`.

        Raises:
            ValueError: it is neither.
        """
        number, is_share = text.strip().removesuffix("%"), text.strip().endswith("%")
        try:
            value = float(number) if is_share else int(number)
        except ValueError:
            value = -1
        if not 0 <= value <= (100 if is_share else sys.maxsize):
            raise ValueError(f"{text!r} is not a number of lines such as 20, or a share such as 5%")
        return cls(share=value / 100) if is_share else cls(count=value)

    def reason(self, ended: int, failed: int) -> str | None:
        """Why to stop after so many lines; None to go on."""
        if failed > self.count:
            have = "line has" if failed == 1 else "lines have"
            return f"{failed} {have} failed, more than --max-failures {self.count:g} allows"
        if ended < ENOUGH:
            return None
        if self.share is not None:
            if failed > self.share * ended:
                return f"{failed} of {ended} lines have failed, more than --max-failures {self.share * 100:g}% allows"
        elif self.count == math.inf and ended == failed:
            return f"the first {ended} lines have all failed"
        return None
