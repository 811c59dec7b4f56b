"""How the tenants of one priority share a worker: deficit round robin by the tokens that were computed for them.

A tenant is an RQ queue. In deficit round robin, each queue that waits is given a quantum of tokens per round, is charged
for what is computed for it, and has its turn while something is left. Rounds need not be counted here: what every
waiting queue is given alike decides nothing among them. What counts is how much each was charged, and the queue that
was charged least is next. A job is reckoned at one quantum while it is held, since what it costs shows only later.

Nobody saves up: a queue that comes, or comes back, starts where the one stands that was charged least. What a queue
had beyond its share is kept until the others have caught up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Tokens that a job is reckoned at while it is held.
QUANTUM_TOKENS = 256


class Shares:
    """What the queues of one priority were charged.

    Args:
        served: tokens computed so far, by queue. It grows, and is read at every call.
    """

    def __init__(self, served: Mapping[str, int]) -> None:
        self._served = served
        #: What `served` said where a queue's charges begin. Only of queues that are active, or were charged too much.
        self._base: dict[str, int] = {}
        self._active: set[str] = set()

    def credits(self, queues: Iterable[str], held: Mapping[str, int]) -> dict[str, float]:
        """Tokens that each queue is owed, on a scale of this moment; `held` is how many of its jobs are held."""
        level = self._level()
        return {
            name: float(-max(self._charged(name, level), level) - QUANTUM_TOKENS * held.get(name, 0)) for name in queues
        }

    def settle(self, active: Iterable[str]) -> None:
        """Note which queues have jobs that wait or are held; the others do not share from now on."""
        level, active = self._level(), set(active)
        for name in active - self._active:
            self._base[name] = self._served.get(name, 0) - max(self._charged(name, level), level)
        self._active = active
        level = self._level()
        # Without anybody to share with there is nothing to make up for.
        self._base = {n: base for n, base in self._base.items() if n in active or active and self._charged(n, 0) > level}

    def _level(self) -> int:
        """What the active queue was charged that was charged least."""
        return min((self._charged(name, 0) for name in self._active), default=0)

    def _charged(self, name: str, unknown: int) -> int:
        base = self._base.get(name)
        return unknown if base is None else self._served.get(name, 0) - base
