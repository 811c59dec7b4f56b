"""How the tenants of one priority share a worker: deficit round robin by the tokens that were computed for them.

A tenant is an RQ queue. In deficit round robin each queue that waits is given a quantum of tokens a round, is charged
for what is computed for it, and has its turn while something is left. The rounds need no counting here: what all that
wait are given alike decides nothing among them. So the next job comes from the queue that was charged least. Until it
shows what a job costs, it is reckoned at one quantum, for as long as it is held.

Nobody saves up: a queue that comes stands where the one stands that waits and was charged least, and one whose jobs are
held, but of which none waits, falls behind that by no more than a quantum. What a queue was charged beyond that is kept
until the others have caught up. Where nobody waits there is nothing to share, and all begin again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Tokens that a job is reckoned at while it is held.
QUANTUM_TOKENS = 256


class Shares:
    """What the queues of one priority were charged.

    Args:
        served: tokens computed so far, by queue. It only grows, and is read at each call.
    """

    def __init__(self, served: Mapping[str, int]) -> None:
        self._served = served
        #: What `served` said where a queue's charges begin: of those that wait, are held or were charged too much.
        self._since: dict[str, int] = {}
        self._waiting: set[str] = set()

    def credits(self, queues: Iterable[str], held: Mapping[str, int]) -> dict[str, float]:
        """Tokens that each queue is owed, on a scale of this moment; `held` is how many of its jobs are held."""
        level = self._level()
        return {name: -float(self._charged(name, level) + QUANTUM_TOKENS * held.get(name, 0)) for name in queues}

    def settle(self, waiting: Iterable[str], held: Iterable[str]) -> None:
        """Note in which queues jobs are left after a pull, and of which some are held."""
        waiting, held, level = set(waiting), set(held), self._level()
        for name in (waiting - self._waiting) | held:
            self._since[name] = self._served.get(name, 0) - self._charged(name, level)
        self._waiting = waiting
        if waiting:
            level, here = self._level(), waiting | held
            self._since = {n: s for n, s in self._since.items() if n in here or self._charged(n, level) > level}
        else:
            self._since = {name: self._served.get(name, 0) for name in held}

    def _level(self) -> int:
        """Where the queue stands that waits and was charged least."""
        return min((self._served.get(n, 0) - self._since[n] for n in self._waiting), default=0)

    def _charged(self, name: str, level: int) -> int:
        """What a queue was charged, where the one that waits and was charged least stands at `level`."""
        since = self._since.get(name)
        return level if since is None else max(level - QUANTUM_TOKENS, self._served.get(name, 0) - since)
