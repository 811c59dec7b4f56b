"""A model without a model: scripted answers from a simulated KV cache, for tests and for `--model fake:echo`.

The next token follows only from the tokens that were decoded into the cache of its sequence. A wrong position, a stale
cache or another sequence's tokens therefore show as wrong text. Attributes of `FakeBackend` inject faults.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shared.settings import FAKE_PREFIX, WorkerSettings
from worker.backend import (
    BatchItem,
    DecodeOutcome,
    Logits,
    ModelError,
    ModelInfo,
    SamplingParams,
    State,
    check_batch,
    check_context,
)
from worker.fake_sampler import FakeSampler
from worker.fake_scripts import (
    CHAT_TEMPLATE,
    EOS,
    N_TOKENS,
    SCRIPTS,
    SPOKEN,
    FakeVocab,
    Script,
    checksum,
    echo_again,
    prompt_length,
)
from worker.sizing import scripted_sizes

#: Numbers in an embedding of the scripted model.
N_EMBD = 16


class FakeBackend:
    """The scripted `Backend`.

    A row of logits gives the script's token 10, the token after a forbidden end 9, five letters drawn from the
    checksum of the sequence 7 to 8, and all else 0. An embedding is drawn from the checksum too.

    Attributes:
        outcomes: what the next passes come to, first to last; a failed one leaves half of its first item behind.
        poison: a value such as NaN for each sequence whose next row is to hold nothing else; used once.
        cannot_cut: behave as a recurrent model does.
        delay_s: how long each pass takes.
        gate: each pass waits until this is set.
        passes: the items of the passes so far that were done, oldest first.
        cache: the tokens of each sequence.
        used: cells of the cache in use; those that sequences share count once.
    """

    def __init__(
        self,
        script: str | Script = "echo",
        *,
        n_ctx: int = 4096,
        n_parallel: int = 4,
        cached_prefixes: int = 8,
        n_batch: int = 512,
        n_ctx_train: int = 1 << 20,
        kv_unified: bool = True,
        can_unify: bool = False,
        adds_bos: bool = False,
        cannot_cut: bool = False,
        delay_s: float = 0.0,
        outcomes: Iterable[DecodeOutcome] = (),
        keep_passes: int | None = None,
        embeds: bool = False,
    ) -> None:
        self.script = _script(script)
        self.vocab = FakeVocab(adds_bos=adds_bos)
        self.outcomes = deque(outcomes)
        self.poison: dict[int, float] = {}
        self.cannot_cut = cannot_cut
        self.failing_puts = 0
        self.delay_s = delay_s
        self.gate = threading.Event()
        self.gate.set()
        self.passes: deque[tuple[BatchItem, ...]] = deque(maxlen=keep_passes)
        self._cached_prefixes = cached_prefixes
        n_seq_max = self._sequences(n_parallel, unified=kv_unified)
        self._make_cache(n_seq_max)
        self._computed = 0
        self.closed = False
        self.info = ModelInfo(
            description="scripted model",
            device="none (scripted)",
            layers=0,
            layers_offloaded=0,
            n_ctx=n_ctx,
            n_ctx_train=n_ctx_train,
            n_ctx_seq=n_ctx if kv_unified else n_ctx // n_parallel,
            n_batch=n_batch,
            n_seq_max=n_seq_max,
            n_parallel=n_parallel,
            kv_unified=kv_unified,
            can_move=not kv_unified,
            n_parked=0 if kv_unified or cannot_cut else cached_prefixes,
            can_unify=can_unify and not kv_unified,
            kv_bytes=n_ctx * 16,  # a state has 4 for each token
            model_bytes=1 << 20,
            chat_template=CHAT_TEMPLATE,
            n_embd=N_EMBD if embeds else None,
        )
        self._rows: Logits = np.empty((0, N_TOKENS), np.float32)
        self._last: tuple[BatchItem, ...] = ()

    @classmethod
    def from_settings(cls, settings: WorkerSettings, most_slots: int | None = None) -> FakeBackend:
        """The backend of `fake:SCRIPT`, or of `fake:SCRIPT:SECONDS` where each pass takes that long.

        Raises:
            ModelError: there is no such script, or the context is too small for the slots.
        """
        sizes = scripted_sizes(settings, most_slots)
        check_context(sizes.n_ctx, sizes.n_parallel)
        script, _, delay = settings.model_path.removeprefix(FAKE_PREFIX).partition(":")
        return cls(
            script,
            n_ctx=sizes.n_ctx,
            n_parallel=sizes.n_parallel,
            cached_prefixes=settings.cached_prefixes,
            n_batch=settings.n_batch or sizes.n_ctx,
            kv_unified=settings.kv_unified != "off",
            delay_s=_seconds(delay),
            keep_passes=0,
            embeds=settings.pooling != "none",
        )

    def decode(self, items: Sequence[BatchItem]) -> DecodeOutcome:
        """See `Backend`. Positions that do not continue the cache are a defect of the caller and fail an assertion."""
        self._check(items)
        self.gate.wait()
        if self.delay_s:
            time.sleep(self.delay_s)
        outcome = self.outcomes.popleft() if self.outcomes else DecodeOutcome.DONE
        if outcome in (DecodeOutcome.ABORTED, DecodeOutcome.FAILED):
            self._grow(items[0].seq_id, items[0].tokens[: (len(items[0].tokens) + 1) // 2])
            return outcome
        if outcome is DecodeOutcome.NO_ROOM or not self._has_room(items):
            return DecodeOutcome.NO_ROOM
        for item in items:
            self._grow(item.seq_id, item.tokens)
        self._last = tuple(items)
        self.passes.append(self._last)
        wanted = [self._row(item.seq_id) for item in items if item.wants_logits]
        self._rows = np.array(wanted, np.float32).reshape(len(wanted), N_TOKENS)
        return DecodeOutcome.DONE

    def logits(self) -> Logits:
        """See `Backend`."""
        return self._rows

    def embedding(self, seq_id: int) -> Logits:
        """See `Backend`. A sequence that was not computed whole in the last pass fails an assertion."""
        assert self.info.n_embd is not None, "not loaded for embeddings"
        whole = [item.seq_id for item in self._last if item.position == 0]
        assert seq_id in whole, f"sequence {seq_id} was not computed whole in the last pass"
        numbers = np.random.default_rng(checksum(self.cache[seq_id])).standard_normal(self.info.n_embd)
        return numbers.astype(np.float32)

    def new_sampler(self, params: SamplingParams) -> FakeSampler:
        """See `Backend`."""
        return FakeSampler(self, params)

    @property
    def used(self) -> int:
        """Cells in use."""
        return len(self._holders)

    def share(self, source: int, target: int, length: int) -> bool:
        """See `Backend`. Without a unified cache the cells are copied."""
        assert not self.cache[target], f"sequence {target} is not empty"
        assert 0 < length <= len(self.cache[source]), f"{length} of the {len(self.cache[source])} tokens of {source}"
        if self.cannot_cut and length < len(self.cache[source]):
            return False
        tokens = self.cache[source][:length]
        if not self.info.kv_unified:
            self._grow(target, tokens)
            return True
        self.cache[target] = tokens
        self._cells[target] = self._cells[source][:length]
        self._holders.update(self._cells[target])
        return True

    def take(self, seq_id: int) -> State:
        """See `Backend`."""
        assert self.info.can_move and self.cache[seq_id], f"nothing can be taken from sequence {seq_id}"
        return np.array(self.cache[seq_id], np.int32).view(np.uint8)

    def put(self, seq_id: int, state: State) -> bool:
        """See `Backend`. Fails once for each time that `failing_puts` says."""
        assert not self.cache[seq_id], f"sequence {seq_id} is not empty"
        if self.failing_puts:
            self.failing_puts -= 1
            return False
        self._grow(seq_id, state.view(np.int32).tolist())
        return True

    def unify(self) -> None:
        """See `Backend`."""
        assert self.info.can_unify, "not with these settings"
        n_seq_max = self._sequences(self.info.n_parallel, unified=True)
        self._make_cache(n_seq_max)
        self.info = replace(
            self.info,
            n_ctx_seq=self.info.n_ctx,
            n_seq_max=n_seq_max,
            kv_unified=True,
            can_move=False,
            n_parked=0,
            can_unify=False,
        )

    def cut(self, seq_id: int, start: int) -> bool:
        """See `Backend`."""
        if self.cannot_cut and 0 < start < len(self.cache[seq_id]):
            return False
        self._shorten(seq_id, start)
        return True

    def clear(self, seq_id: int) -> None:
        """See `Backend`."""
        self._shorten(seq_id, 0)

    def close(self) -> None:
        """See `Backend`."""
        self.closed = True

    def _sequences(self, n_parallel: int, *, unified: bool) -> int:
        return min(256, n_parallel + self._cached_prefixes) if unified and not self.cannot_cut else n_parallel

    def _make_cache(self, n_seq_max: int) -> None:
        self.cache: list[list[int]] = [[] for _ in range(n_seq_max)]
        # One cell for each token that was computed, and how many sequences it is in.
        self._cells: list[list[int]] = [[] for _ in range(n_seq_max)]
        self._holders: Counter[int] = Counter()

    def _check(self, items: Sequence[BatchItem]) -> None:
        check_batch(items, self.info)
        ends: dict[int, int] = {}
        for item in items:
            end = ends.get(item.seq_id, len(self.cache[item.seq_id]))
            assert item.position == end, (
                f"sequence {item.seq_id} holds {end} tokens, the batch begins at {item.position}"
            )
            assert all(0 <= token < N_TOKENS for token in item.tokens), f"token out of range in {item}"
            ends[item.seq_id] = end + len(item.tokens)

    def _grow(self, seq_id: int, tokens: Sequence[int]) -> None:
        cells = range(self._computed, self._computed + len(tokens))
        self._computed += len(tokens)
        self.cache[seq_id] += tokens
        self._cells[seq_id] += cells
        self._holders.update(cells)

    def _shorten(self, seq_id: int, length: int) -> None:
        for cell in self._cells[seq_id][length:]:
            self._holders[cell] -= 1
            if not self._holders[cell]:
                del self._holders[cell]
        del self.cache[seq_id][length:], self._cells[seq_id][length:]

    def _has_room(self, items: Sequence[BatchItem]) -> bool:
        if self.info.kv_unified:
            return self.used + sum(len(item.tokens) for item in items) <= self.info.n_ctx
        return all(len(self.cache[item.seq_id]) + len(item.tokens) <= self.info.n_ctx_seq for item in items)

    def _row(self, seq_id: int) -> Logits:
        row = np.zeros(N_TOKENS, np.float32)
        if seq_id in self.poison:
            row[:] = self.poison.pop(seq_id)
            return row
        tokens = self.cache[seq_id]
        prompt_len = prompt_length(tokens)
        chosen, bits = self.script(tokens, prompt_len), checksum(tokens)
        for i in range(5):
            row[SPOKEN + ord("a") + (bits >> (5 * i)) % 26] = 8 - i / 5
        if chosen == EOS:
            row[echo_again(tokens, prompt_len)] = 9
        row[chosen] = 10
        return row


def _script(script: str | Script) -> Script:
    if not isinstance(script, str):
        return script
    if script not in SCRIPTS:
        raise ModelError(f"there is no script {script!r}; use one of {', '.join(f'fake:{name}' for name in SCRIPTS)}")
    return SCRIPTS[script]


def _seconds(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise ModelError(f"{text!r} is not a number of seconds; write for example fake:echo:0.05") from None
