"""How many slots and how large a context, where the settings leave that to the model and the machine.

Plain arithmetic; what a model needs and what a device has are found out in `worker/llama_sizing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.settings import WorkerSettings
from worker.backend import MIN_TOKENS_PER_SLOT, ModelError, check_context

#: Sequences that llama.cpp can tell apart. Source: LLAMA_MAX_SEQ in llama-cparams.h.
MOST_SEQUENCES = 256

#: `n_parallel auto` gives each slot so much of the context, at least: a prompt and an answer of usual length.
TOKENS_PER_SLOT = 512

#: No more slots than that are of use. The measurement is in docs/performance.md; that for GPUs is an estimate.
USEFUL_ON_CPU, USEFUL_ON_GPU = 16, 32

#: llama.cpp rounds contexts up to a multiple of this. Source: the constructor of `llama_context`.
ROUND = 256

#: Tokens of a pass for embeddings where `n_batch` is left out. Each of them takes a row of logits too, which nobody
#: reads: 400 MB with a vocabulary of 50,000.
EMBEDDING_BATCH = 2048

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a backend is loaded with."""

    n_ctx: int
    n_parallel: int


#: What the scripted model has where nothing is asked for.
SCRIPTED = Sizes(n_ctx=8192, n_parallel=4)


@dataclass(frozen=True, slots=True)
class Place:
    """A device on which a context takes memory: so many bytes in any case, more for each token and each sequence."""

    name: str
    free: int
    fixed: int = 0
    per_token: float = 0.0
    per_sequence: int = 0

    def tokens(self, sequences: int) -> float:
        """Tokens of context that fit beside so many sequences; below 0 where not even these do."""
        left = self.free - self.fixed - sequences * self.per_sequence
        if left < 0:
            return -1
        return left / self.per_token if self.per_token else float("inf")


@dataclass(frozen=True, slots=True)
class Model:
    """What sizes depend on of a model and the devices it is on.

    `most_slots` is the largest number that is of use there. `spare_sequences` come on top of the slots, for prefixes.
    """

    n_ctx_train: int
    places: Sequence[Place]
    most_slots: int
    spare_sequences: int = 0

    def sequences(self, slots: int) -> int:
        """Sequences of a context with so many slots."""
        return min(MOST_SEQUENCES, slots + self.spare_sequences)

    def room(self, slots: int) -> tuple[float, Place]:
        """Tokens of context that fit with so many slots, and the place where no more do."""
        tokens = ((place.tokens(self.sequences(slots)), place) for place in self.places)
        return min(tokens, key=lambda found: found[0])


def given_sizes(settings: WorkerSettings) -> Sizes | None:
    """The sizes that the settings ask for; None where they leave one open."""
    if isinstance(settings.n_parallel, int) and settings.n_ctx:
        return Sizes(settings.n_ctx, settings.n_parallel)
    return None


def scripted_sizes(settings: WorkerSettings, most_slots: int | None = None) -> Sizes:
    """The sizes of the scripted model, which has no memory to fill."""
    if isinstance(settings.n_parallel, int):
        slots = settings.n_parallel
    else:
        slots = min([most_slots or SCRIPTED.n_parallel, *([settings.n_batch] if settings.n_batch else [])])
    return Sizes(settings.n_ctx or SCRIPTED.n_ctx, slots)


def fit(settings: WorkerSettings, model: Model) -> Sizes:
    """Decide what the settings leave open.

    A context that is asked for is taken as it is, and so are slots. Open slots are as many as are of use, as long as
    each has `TOKENS_PER_SLOT` of the context. An open context is the model's own, or that much for each slot where it
    is more; it is cut to what fits.

    Raises:
        ModelError: the context is too small for the slots, or not even the smallest fits; the message has the numbers.
    """
    slots = settings.n_parallel if isinstance(settings.n_parallel, int) else _open_slots(settings, model)
    if settings.n_ctx:
        check_context(settings.n_ctx, slots)
        return Sizes(settings.n_ctx, slots)
    wanted = max(own_context(model.n_ctx_train, slots), EMBEDDING_BATCH if settings.pooling != "none" else 0)
    room, place = model.room(slots)
    least = max(ROUND, slots * MIN_TOKENS_PER_SLOT)
    if room < least:
        raise ModelError(_too_little(place, least, model.sequences(slots)))
    return Sizes(wanted if room >= wanted else int(room) // ROUND * ROUND, slots)


def own_context(n_ctx_train: int, slots: int) -> int:
    """An open context where memory does not matter."""
    return max(n_ctx_train, slots * TOKENS_PER_SLOT)


def _open_slots(settings: WorkerSettings, model: Model) -> int:
    bounds = [model.most_slots]
    bounds += [settings.n_batch] if settings.n_batch else []
    bounds += [settings.n_ctx // TOKENS_PER_SLOT] if settings.n_ctx else []
    slots = max(1, min(bounds))

    def fits() -> bool:
        # Beside a context that is asked for, only what the slots take by themselves is looked at.
        return model.room(slots)[0] >= (0 if settings.n_ctx else slots * TOKENS_PER_SLOT)

    while slots > 1 and not fits():
        slots -= 1
    return slots


def _too_little(place: Place, tokens: int, sequences: int) -> str:
    needed = place.fixed + sequences * place.per_sequence + tokens * place.per_token
    return (
        f"a context of {tokens} tokens takes {needed / MIB:.0f} MiB beside the model, and {place.name} has "
        f"{place.free / MIB:.0f} MiB to give; free some, use a smaller model, or lower n_parallel or n_ubatch"
    )
