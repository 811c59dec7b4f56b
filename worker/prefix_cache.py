"""The KV cache as the engine sees it: every request begins from the longest prefix that any sequence holds.

A sequence may be one that is kept after its request, one that a slot works on, or one that is still being prefilled;
for what the last has yet to compute, the newcomer waits instead of computing it again. In a unified cache the prefix
is in both sequences without being copied. In a split one, a kept sequence is taken over and a running one is copied;
there are only as many as slots, so what is kept beyond these is parked outside the KV cache. When cells, sequences or
places run short, what was used least recently goes first.

Source of the idea of one radix tree over everything that is cached: SGLang's RadixAttention (Zheng et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.backend import Backend, State
from worker.kv_cells import KvCells
from worker.radix_tree import RadixTree
from worker.requests import Request
from worker.sequences import Sequence, Sequences

#: To wait for another request's prefill pays from so many tokens on; a tick costs about as much as these.
WAIT_TOKENS = 32
#: To copy a sequence pays from so many tokens on, where cells cannot be shared.
COPY_TOKENS = 64
#: Cells are evicted at least so many at a time, so that not every tick has to.
EVICT_CELLS = 64
#: A kept cell costs every computed token a test of its mask. Over so many computed tokens that comes to the price of
#: computing one token of a prompt. Measured on a CPU; docs/performance.md has the figures.
RENT_TOKENS = 6000
#: So many cells are kept even where nothing is ever reused, or it would never show that something could be.
FREE_CELLS = 512
#: Without a unified cache, sequences are moved beside each other if that pays within so many passes.
MOVE_PASSES = 8
#: What is parked may take so much of the memory of the KV cache on top.
PARKED_SHARE = 0.5
#: So many more are kept until it has shown whether anything is reused.
START_CREDIT = 512


@dataclass(frozen=True, slots=True)
class Match:
    """What a request could begin from.

    Attributes:
        donor: the sequence with the most tokens of it computed; None if there is none.
        length: how many.
        coming: a running sequence that will have computed more of it; None if none is worth waiting for.
        awaits: how many tokens of it that will be.
    """

    donor: Sequence | None = None
    length: int = 0
    coming: Sequence | None = None
    awaits: int = 0

    @property
    def expected(self) -> int:
        """Tokens that need not be computed."""
        return max(self.length, self.awaits)


class PrefixCache:
    """Gives out, keeps and evicts the sequences of a backend. Engine thread only."""

    def __init__(self, backend: Backend) -> None:
        info = backend.info
        self._backend = backend
        self._is_unified = info.kv_unified
        self._parks = info.can_move and info.n_parked > 0
        #: Cells that all sequences share; None where each has its own.
        self.cells = info.n_ctx if info.kv_unified else None
        self._sequences = Sequences(info.n_seq_max)
        self._tree: RadixTree[Sequence] = RadixTree()
        self._kv = KvCells()
        #: Cells that are kept for reuse alone. A number, so that any thread may look.
        self.tokens = 0
        self._is_counted = True
        self._may_line_up = False
        self._credit = float(START_CREDIT)

    # --- figures ---

    @property
    def used(self) -> int:
        """Cells in use, those kept for reuse included. Any thread may look."""
        return self._kv.used

    def held(self, sequences: list[Sequence], match: Match) -> int:
        """Cells that the sequences and the prefix of a match hold together."""
        parts = [(s, s.n_past) for s in sequences]
        return self._kv.held([*parts, (match.donor, match.length)] if match.donor else parts)

    # --- the life of a request's sequence ---

    def find(self, request: Request) -> Match:
        """The longest prefix of a request that is there or about to be. At least one token is left to compute."""
        if not request.cache_prompt or request.embed:
            return Match()
        return self._find([*request.prompt, *request.generated], None)

    def begin(self, request: Request, match: Match) -> Sequence:
        """A sequence for a request, which begins with what was found for it or waits for it."""
        tokens = [*request.prompt, *request.generated]
        shareable = request.cache_prompt and not request.embed
        if match.donor is not None and not match.donor.in_use:
            self._credit = min(self._backend.info.n_ctx, self._credit + match.length)
        if match.donor is not None:
            self._sequences.touch(match.donor)  # what makes room now is not what is about to be used
        sequence = self._take_over(match) or self._fresh(match.donor)
        if sequence in self._tree:
            self._tree.remove(sequence)
        sequence.tokens, sequence.shareable = tokens, shareable
        if match.coming is not None:
            sequence.donor, sequence.awaits = match.coming, match.awaits
        elif sequence is not match.donor:
            self._share(match.donor, sequence, match.length)
        if shareable:
            self._tree.add(sequence)
        self._touch()
        return sequence

    def is_waiting(self, sequence: Sequence) -> bool:
        """Whether a sequence still waits for another's prefill; once not, it begins with what that has computed."""
        donor = sequence.donor
        if donor is None:
            return False
        if donor.in_use and donor.n_past < sequence.awaits and donor.born < sequence.born:
            return True
        match = self._find(sequence.tokens, sequence)
        if match.coming is not None:
            sequence.donor, sequence.awaits = match.coming, match.awaits
            return True
        sequence.donor, sequence.awaits = None, 0
        self._share(match.donor, sequence, match.length)
        self._touch()
        return False

    def computed(self, sequence: Sequence, count: int) -> None:
        """The next `count` tokens of a sequence are in the KV cache now."""
        assert 0 < count <= sequence.remaining, f"{count} of {sequence.remaining} remaining tokens computed"
        self._kv.grow(sequence, count)
        sequence.n_past += count

    def append(self, sequence: Sequence, token: int) -> None:
        """A sequence goes on with a token that is yet to be computed."""
        sequence.tokens.append(token)
        if sequence.shareable:
            self._tree.extend(sequence)

    def end(self, sequence: Sequence) -> None:
        """No slot works on a sequence any more; what it holds is kept if others may begin from it."""
        sequence.in_use, sequence.donor, sequence.awaits = False, None, 0
        if not (sequence.shareable and sequence.n_past):
            self.drop(sequence)
            return
        if sequence.remaining:
            self._shorten(sequence, sequence.n_past)
        self._sequences.touch(sequence)
        self._drop_if_covered(sequence)
        self._touch()

    def drop(self, sequence: Sequence) -> None:
        """Forget all that a sequence holds."""
        self._backend.clear(sequence.seq_id)
        self._kv.cut(sequence, 0)
        if sequence in self._tree:
            self._tree.remove(sequence)
        self._sequences.give_back(sequence)
        self._touch()

    # --- places ---

    def line_up(self) -> None:
        """Without a unified cache, move the sequences in use beside each other; what is kept changes places with them.

        llama.cpp computes neighbours in one go and goes through the whole model once more for each gap. A move copies
        what is held, which is less than the model unless it is very long.

        Source: `llama_batch_allocr::split_equal`, which takes sequences into a micro-batch while each follows the last.
        """
        if not (self._may_line_up and self._backend.info.can_move):
            return
        self._may_line_up = False
        held = {s.seq_id: s.n_past for s in self._sequences}
        used = {s.seq_id for s in self._sequences.in_use}
        if not used or max(used) - min(used) < len(used):
            return
        size, count = len(used), self._backend.info.n_seq_max
        windows = [range(start, start + size) for start in range(count - size + 1)]

        def cost(window: range) -> int:
            return sum(held.get(i, 0) for i in used.symmetric_difference(window))

        best = min(windows, key=cost)
        if not self._pays(cost(best)):
            return
        for source, target in zip(sorted(used.difference(best)), sorted(set(best) - used), strict=True):
            self._swap(source, target)

    def _pays(self, tokens: int) -> bool:
        """Whether moving so many takes less than going `MOVE_PASSES` times through the model; memory bounds both."""
        info = self._backend.info
        copied = 4 * tokens * info.kv_bytes / info.n_ctx  # taken out and put in, each read and written
        return copied <= MOVE_PASSES * info.model_bytes

    def _swap(self, source: int, target: int) -> None:
        moved = [s for s in (self._sequences.at(source), self._sequences.at(target)) if s is not None]
        states = [(s, self._backend.take(s.seq_id)) for s in moved if s.n_past]
        for sequence, _ in states:
            self._backend.clear(sequence.seq_id)
        self._sequences.swap(moved[0], target)
        for sequence, state in states:
            if self._backend.put(sequence.seq_id, state):
                continue
            if sequence.in_use:  # it computes what it had once more
                self._kv.cut(sequence, 0)
                sequence.n_past = 0
            else:
                self.drop(sequence)

    # --- room ---

    def make_room(self, cells: int) -> bool:
        """Evict what is kept until so many cells are free; whether they are. Always true of a split cache."""
        if self.cells is None:
            return True
        if self.cells - self._kv.used >= cells:
            return True
        for sequence in self._sequences.kept:
            while sequence.n_past and (missing := cells - (self.cells - self._kv.used)) > 0:
                self._evict(sequence, missing)
        self._touch()
        return self.cells - self._kv.used >= cells

    def count(self) -> None:
        """Bring `tokens` up to date."""
        if not self._is_counted:
            self.tokens = self._kv.used - self._kv.held([(s, s.n_past) for s in self._sequences.in_use])
            self._is_counted = True

    def pay_rent(self, computed: int) -> None:
        """What is kept pays for slowing down the tokens just computed, out of what its reuse has saved.

        In a unified cache every token is compared with all cells in use, so keeping what nobody asks for again is not
        free. Each token that is found again earns the right to keep one cell; where that is used up, little is kept.
        """
        self.count()
        if self.cells is None or not self.tokens:
            return
        self._credit = max(0.0, self._credit - self.tokens * computed / RENT_TOKENS)
        excess = self.tokens - FREE_CELLS - int(self._credit)
        if excess > 0:
            self.make_room(self.cells - self._kv.used + excess)

    def evict_all(self) -> bool:
        """Drop everything that is kept; whether anything was."""
        kept = self._sequences.kept
        for sequence in kept:
            self.drop(sequence)
        return bool(kept)

    def check_integrity(self) -> None:
        """Raise AssertionError where sequences, tree and cells contradict each other."""
        sequences = list(self._sequences)
        self._tree.check_integrity()
        self._kv.check_integrity(sequences)
        for s in sequences:
            name = f"sequence {s.seq_id}"
            assert (s in self._tree) == s.shareable, f"{name}: in the tree or not"
            assert sum(run.holders[s] for run in s.runs) == s.n_past, f"{name}: cells and tokens differ"
            assert s.in_use or s.n_past == len(s.tokens) > 0, f"{name} is kept with tokens it does not hold"
            assert s.n_past == 0 or s.donor is None, f"{name} waits for what it has begun to compute"
        for s in self._sequences.parked:
            assert s in self._tree and not s.runs and s.n_past == len(s.tokens) > 0, "a parked sequence is not whole"
        if self.cells is not None:
            assert self._kv.used <= self.cells, "more cells in use than there are"

    # --- how ---

    def _touch(self) -> None:
        """`tokens` has to be counted anew: once a tick, since that looks at every sequence."""
        self._is_counted = False
        self._may_line_up = True

    def _find(self, tokens: list[int], me: Sequence | None) -> Match:
        limit = len(tokens) - 1
        donor: Sequence | None = None
        coming: Sequence | None = None
        length = awaits = 0
        for common, sequence in self._tree.matches(tokens):
            common = min(common, limit)
            if common <= length:
                break
            if sequence is me or (me is not None and sequence.in_use and sequence.born > me.born):
                continue
            if sequence.in_use and common > max(sequence.n_past, awaits):
                coming, awaits = sequence, common
            have = min(common, sequence.n_past)
            if have > length and self._can_begin_from(sequence, have):
                donor, length = sequence, have
        if awaits - length < WAIT_TOKENS or not self._can_begin_from(coming, awaits):
            coming, awaits = None, 0
        return Match(donor, length, coming, awaits)

    def _can_begin_from(self, sequence: Sequence | None, length: int) -> bool:
        """Without a unified cache all has to be copied, except what is kept there and given up for it."""
        if sequence is None:
            return False
        if self._is_unified or length >= COPY_TOKENS:
            return True
        return not sequence.in_use and sequence.state is None and self._may_give_up(sequence, length)

    def _may_give_up(self, sequence: Sequence, length: int) -> bool:
        """Whether a request may cut a kept sequence to its own beginning; where it can be copied, if little is lost."""
        return not self._parks or sequence.n_past - length <= length

    def _take_over(self, match: Match) -> Sequence | None:
        """The kept sequence of a match itself, where nothing is lost by going on in it or nothing else is possible."""
        sequence, length = match.donor, match.length
        if sequence is None or sequence.in_use or sequence.state is not None or match.coming is not None:
            return None
        if not self._may_give_up(sequence, length):
            return None
        is_last = not self._sequences.has_free and len(self._sequences.kept) == 1
        if self._is_unified and length < sequence.n_past and not is_last:
            return None
        if length < sequence.n_past and not self._shorten(sequence, length):
            return None
        self._sequences.begin(sequence)
        return sequence

    def _fresh(self, spare: Sequence | None) -> Sequence:
        """An empty sequence, the least recently used of those that are kept if there is no other."""
        if not self._sequences.has_free:
            kept = self._sequences.kept
            self._park(next((s for s in kept if s is not spare), kept[0]))
        return self._sequences.take()

    def _park(self, sequence: Sequence) -> None:
        """Make a place free; what is kept there is kept elsewhere, if that is possible and of use."""
        if not (self._parks and sequence.n_past >= COPY_TOKENS):
            self.drop(sequence)
            return
        info = self._backend.info
        state = self._backend.take(sequence.seq_id)
        self._backend.clear(sequence.seq_id)
        self._kv.cut(sequence, 0)
        self._sequences.park(sequence, state)
        self._touch()
        parked = self._sequences.parked
        taken = sum(s.state.nbytes for s in parked if s.state is not None)
        while len(parked) > info.n_parked or taken > PARKED_SHARE * info.kv_bytes:
            oldest = parked.pop(0)
            taken -= oldest.state.nbytes if oldest.state is not None else 0
            self._forget(oldest)

    def _forget(self, sequence: Sequence) -> None:
        self._tree.remove(sequence)
        self._sequences.forget(sequence)

    def _share(self, donor: Sequence | None, target: Sequence, length: int) -> None:
        # A donor that had to make room for the target itself has nothing left.
        if donor is None or donor.n_past < length or not length:
            return
        if donor.state is not None:
            self._put_back(donor, donor.state, target, length)
        elif self._backend.share(donor.seq_id, target.seq_id, length):
            self._kv.share(donor, target, length)
            target.n_past = length
            self._sequences.touch(donor)

    def _put_back(self, parked: Sequence, state: State, target: Sequence, length: int) -> None:
        """Let an empty sequence begin with what is parked, which need not be kept where all of it is in that one."""
        done = self._backend.put(target.seq_id, state)
        if done and length < parked.n_past and not self._backend.cut(target.seq_id, length):
            self._backend.clear(target.seq_id)
            return
        if done:
            self._kv.grow(target, length)
            target.n_past = length
            self._sequences.touch(parked)
        if not done or length == parked.n_past:
            self._forget(parked)

    def _shorten(self, sequence: Sequence, length: int) -> bool:
        """Keep the first `length` tokens of a sequence; where the model cannot do that, nothing changes."""
        if length < sequence.n_past:
            if not self._backend.cut(sequence.seq_id, length):
                return False
            self._kv.cut(sequence, length)
            sequence.n_past = length
        # The tree may point into the old list.
        sequence.tokens = sequence.tokens[:length]
        if sequence in self._tree:
            self._tree.cut(sequence)
        return True

    def _evict(self, sequence: Sequence, cells: int) -> None:
        """Take cells off the end of a kept sequence; all of it where that frees nothing or leaves little."""
        own = self._kv.own_tail(sequence)
        left = sequence.n_past - min(own, max(cells, EVICT_CELLS))
        if not own or left < EVICT_CELLS or not self._shorten(sequence, left):
            self.drop(sequence)
        else:
            self._drop_if_covered(sequence)

    def _drop_if_covered(self, sequence: Sequence) -> None:
        """What another sequence holds as well need not be kept twice."""
        if any(other.n_past >= sequence.n_past for other in self._tree.longer(sequence)):
            self.drop(sequence)
