"""The next token of one slot, from its row of logits."""

from __future__ import annotations

from worker.backend import Logits, Vocabulary
from worker.logprobs import RowLogprobs
from worker.requests import Token
from worker.slots import Slot


def next_token(slot: Slot, logits: Logits, row: int, best: int, vocab: Vocabulary, now: float) -> Token | None:
    """The next token of a slot and what it says; None at the end of the answer.

    Args:
        logits: its row of the last pass, which sampling may change.
        row: the number of that row.
        best: the token with the largest logit.

    Raises:
        GrammarDeadEnd: the grammar allows no token, and is not complete.
    """
    request, sampler, transcript = slot.request, slot.sampler, slot.transcript
    assert request is not None and sampler is not None and transcript is not None
    params = request.params
    # Before the sampler, which may change the row in place.
    raw = RowLogprobs(logits, request.logprobs) if request.logprobs is not None else None
    token: int | None = best
    index = slot.generated
    if not slot.is_argmax or (params.ignore_eos and best in vocab.eog):
        token = sampler.sample(row, index)
    if token is None or (token in vocab.eog and not params.ignore_eos):
        return None
    text, delta = transcript.push(token)
    logprob = None
    if raw is not None:
        logprob = raw.of(token, vocab)
        slot.logprobs.append(logprob)
    if slot.prompt_s is None:
        slot.prompt_s = slot.used_s(now)
    return Token(request, index, token, text, delta, logprob)
