from __future__ import annotations

import json

import numpy as np
import psutil
import pytest

from shared.errors import BadLogits, GrammarDeadEnd, InvalidGrammar
from worker.backend import BatchItem, DecodeOutcome, SamplingParams
from worker.llama_backend import LlamaBackend

pytestmark = pytest.mark.model

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})){0,12} "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,3}) ("." [0-9]{1,3})? ws
ws     ::= [ ]{0,1}
"""


def generate(
    llama: LlamaBackend,
    params: SamplingParams,
    most: int = 40,
    prompt: str = PROMPT,
    earlier: tuple[int, ...] = (),
    seq_id: int = 0,
) -> tuple[list[int], str]:
    """Generate alone; returns the tokens and how it ended: `end`, `complete` or `length`."""
    for other in range(llama.info.n_seq_max):
        llama.clear(other)
    tokens = llama.vocab.tokenize(prompt, parse_special=True) + list(earlier)
    sampler = llama.new_sampler(params)
    for token in earlier:
        sampler.accept(token)
    answer, position = list(earlier), 0
    try:
        while len(answer) < most:
            assert llama.decode([BatchItem(seq_id, position, tokens, True)]) is DecodeOutcome.DONE
            position += len(tokens)
            token = sampler.sample(0, len(answer))
            if token is None:
                return answer, "complete"
            if token in llama.vocab.eog:
                return answer, "end"
            answer.append(token)
            tokens = [token]
        return answer, "length"
    finally:
        sampler.close()


def text_of(llama: LlamaBackend, tokens: list[int]) -> str:
    return b"".join(map(llama.vocab.piece, tokens)).decode("utf-8", "replace")


def test_greedy_is_the_largest_logit(llama: LlamaBackend) -> None:
    tokens, end = generate(llama, SamplingParams())
    assert (text_of(llama, tokens), end) == ("The capital of France is Paris.", "end")


def test_a_seed_gives_the_same_text_again_and_another_seed_another(llama: LlamaBackend) -> None:
    texts = {}
    for seed in (0, 1, 2**32 + 1, 2**63 - 1):
        params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        texts[seed] = generate(llama, params, most=8)
        assert generate(llama, params, most=8, seq_id=1) == texts[seed]
    assert len({tuple(tokens) for tokens, _ in texts.values()}) == 4


def test_ignore_eos_never_ends(llama: LlamaBackend) -> None:
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, ignore_eos=True, repeat_penalty=1.01)
        assert generate(llama, params, most=20)[1] == "length"


def test_bias_makes_and_forbids_tokens(llama: LlamaBackend) -> None:
    (usual, *_), _ = generate(llama, SamplingParams(), most=1)
    assert generate(llama, SamplingParams(logit_bias=((usual, -100.0),)), most=1)[0] != [usual]
    assert generate(llama, SamplingParams(logit_bias=((777, 100.0),), temperature=1.0), most=3)[0] == [777] * 3


def test_penalties_stop_a_repetition(llama: LlamaBackend) -> None:
    prompt = "one two one two one two one two"
    plain, _ = generate(llama, SamplingParams(), most=12, prompt=prompt)
    varied, _ = generate(llama, SamplingParams(presence_penalty=2.0, repeat_penalty=2.0), most=12, prompt=prompt)
    assert len(set(plain)) < len(set(varied)) == 12


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_completed_grammar_ends_the_answer(llama: LlamaBackend, temperature: float, ignore_eos: bool) -> None:
    params = SamplingParams(grammar='root ::= "Berlin"', temperature=temperature, ignore_eos=ignore_eos)
    tokens, end = generate(llama, params)
    assert text_of(llama, tokens) == "Berlin"
    assert end == "complete" or (end == "end" and not ignore_eos)


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_of_json_gives_json(llama: LlamaBackend, seed: int) -> None:
    params = SamplingParams(grammar=JSON, temperature=1.0, seed=seed, ignore_eos=True)
    tokens, end = generate(llama, params, most=120)
    text = text_of(llama, tokens)
    assert end == "length" or isinstance(json.loads(text), dict), text
    assert text.startswith("{")


def test_control_tokens_do_not_count_as_their_text(llama: LlamaBackend) -> None:
    params = SamplingParams(grammar='root ::= "<|im_start|>"')
    assert text_of(llama, generate(llama, params)[0]) == "<|im_start|>"
    (named,), _ = generate(llama, SamplingParams(grammar="root ::= <|im_start|>"))
    assert llama.vocab.token_text(named) == "<|im_start|>"


def test_the_draw_among_allowed_tokens_is_the_same_again(llama: LlamaBackend) -> None:
    params = SamplingParams(grammar="root ::= [0-9]{20}", temperature=1.5, seed=9, ignore_eos=True)
    tokens, end = generate(llama, params)
    assert (tokens, end) == generate(llama, params, seq_id=2)
    assert len(text_of(llama, tokens)) == 20 and end == "complete"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_interrupted_answer_goes_on(llama: LlamaBackend, temperature: float) -> None:
    params = SamplingParams(
        grammar='root ::= ("red " | "green " | "blue ")+',
        temperature=temperature,
        ignore_eos=True,
        presence_penalty=0.5,
    )
    whole, _ = generate(llama, params, most=12)
    sampler = llama.new_sampler(params)
    for token in whole[:5]:
        sampler.accept(token)
    # On the same row the resumed sampler chooses what the first one chose.
    tokens = llama.vocab.tokenize(PROMPT, parse_special=True)
    llama.clear(0)
    llama.decode([BatchItem(0, 0, tokens, False)])
    for position, token in enumerate(whole[:5], len(tokens)):
        llama.decode([BatchItem(0, position, [token], position == len(tokens) + 4)])
    assert sampler.sample(0, 5) == whole[5]
    sampler.close()


def test_an_earlier_token_outside_the_grammar_fails_alone(llama: LlamaBackend) -> None:
    sampler = llama.new_sampler(SamplingParams(grammar='root ::= "yes"'))
    for token in (*llama.vocab.tokenize("no", parse_special=False), 0, 49152, -1):
        with pytest.raises(GrammarDeadEnd):
            sampler.accept(token)
    sampler.close()


def test_a_dead_end_fails_alone(llama: LlamaBackend) -> None:
    # No token begins with a zero character, so nothing can come after the first letter.
    params = SamplingParams(grammar=r'root ::= "a" "\x00"', ignore_eos=True)
    with pytest.raises(GrammarDeadEnd):
        generate(llama, params)


@pytest.mark.parametrize("grammar", ['root ::= "a', "root ::= root", "Root ::= [^\\n]+", 'root ::= "a"{5,2}', ""])
def test_a_malformed_grammar_is_refused(llama: LlamaBackend, grammar: str) -> None:
    with pytest.raises(InvalidGrammar):
        llama.new_sampler(SamplingParams(grammar=grammar))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("grammar", [None, "root ::= [a-z]+"])
def test_a_row_without_finite_logits_fails_alone(llama: LlamaBackend, value: float, grammar: str | None) -> None:
    sampler = llama.new_sampler(SamplingParams(temperature=0.8, grammar=grammar))
    llama.decode([BatchItem(0, 0, [5], True), BatchItem(1, 0, [5], True)])
    llama.logits()[0] = value
    with pytest.raises(BadLogits):
        sampler.sample(0, 0)
    assert sampler.sample(1, 0) is not None
    sampler.close()


def test_one_nan_is_enough(llama: LlamaBackend) -> None:
    sampler = llama.new_sampler(SamplingParams(temperature=0.8))
    llama.decode([BatchItem(0, 0, [5], True)])
    llama.logits()[0, 40_000] = np.nan
    with pytest.raises(BadLogits):
        sampler.sample(0, 0)


def test_only_ends_left_under_ignore_eos_fails_alone(llama: LlamaBackend) -> None:
    sampler = llama.new_sampler(SamplingParams(temperature=0.8, ignore_eos=True))
    llama.decode([BatchItem(0, 0, [5], True)])
    row = llama.logits()[0]
    row[[token for token in range(len(row)) if token not in llama.vocab.eog]] = -np.inf
    with pytest.raises(BadLogits):
        sampler.sample(0, 0)


def test_a_grammar_read_in_too_many_ways_fails_in_the_end(llama: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.llama_sampler._MAX_STEP_S", 0.02)
    params = SamplingParams(
        grammar='root ::= "(" root ")" | "(" root "]" | "x"', logit_bias=((24, 50.0),), ignore_eos=True
    )
    assert llama.vocab.piece(24) == b"("
    with pytest.raises(InvalidGrammar, match="too many ways"):
        generate(llama, params, most=30)


def test_samplers_leave_no_memory_behind(llama: LlamaBackend) -> None:
    def make(count: int, params: SamplingParams) -> int:
        for _ in range(count):
            sampler = llama.new_sampler(params)
            sampler.close()
            sampler.close()
        return psutil.Process().memory_info().rss

    grammar = SamplingParams(grammar='root ::= ("a" | "b")*')
    plain = SamplingParams(temperature=0.8, ignore_eos=True)
    before = make(500, grammar)
    make(48_000, plain)
    assert make(2000, grammar) - before < 4 * 2**20
