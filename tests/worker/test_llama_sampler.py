from __future__ import annotations

import json

import numpy as np
import psutil
import pytest

from shared.errors import BadLogits, GrammarDeadEnd, InvalidGrammar
from worker.backend import BatchItem, DecodeOutcome, SamplingParams
from worker.constraint import (
    Chain,
    Control,
    Literal,
    Until,
    json_object_constraint,
    json_schema_constraint,
    mark,
    render,
)
from worker.llama_backend import LlamaBackend
from worker.llama_sampler import Grammar
from worker.llama_vocab import LlamaVocab
from worker.matcher import Matcher

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
            if sampler.is_complete:
                return answer, "complete"
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
    assert end == "complete"


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


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "kind": {"enum": ["cat", "dog", "é😀"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-zé]{2,9}$"}, "number": {"type": "integer"}},
            "required": ["city", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "tags", "home"],
    "additionalProperties": False,
}
ASK_JSON = "<|im_start|>user\nGive me a JSON object with the keys name and age.<|im_end|>\n<|im_start|>assistant\n"


def is_person(value: object) -> bool:
    match value:
        case {
            "name": str(name),
            "kind": "cat" | "dog" | "é😀",
            "tags": [*tags],
            "home": {"city": str(), "number": int()},
        }:
            return 1 <= len(name) <= 20 and 1 <= len(tags) <= 3 and all(len(tag) <= 8 for tag in tags)
    return False


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_json_object_ends_when_it_closes(llama: LlamaBackend, ignore_eos: bool) -> None:
    params = SamplingParams(constraint=json_object_constraint(), ignore_eos=ignore_eos)
    tokens, end = generate(llama, params, most=500, prompt=ASK_JSON)
    text = text_of(llama, tokens)
    assert end == "complete"
    assert text == text.strip()
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.0, 1), *((2.0, seed) for seed in range(10))])
def test_a_schema_gives_a_value_of_it(llama: LlamaBackend, temperature: float, seed: int) -> None:
    params = SamplingParams(
        constraint=json_schema_constraint(PERSON, "p"),
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
    )
    # A number before it makes greedy answers differ too.
    tokens, end = generate(llama, params, most=500, prompt=f"{seed}. {ASK_JSON}")
    assert end == "complete"
    assert is_person(json.loads(text_of(llama, tokens)))


def test_a_value_that_is_cut_stays_cut(llama: LlamaBackend) -> None:
    params = SamplingParams(constraint=json_schema_constraint(PERSON, "p"))
    tokens, end = generate(llama, params, most=6, prompt=ASK_JSON)
    assert end == "length" and len(tokens) == 6
    with pytest.raises(json.JSONDecodeError):
        json.loads(text_of(llama, tokens))


@pytest.mark.parametrize("value", ['日本語 e\u0301 é ✓ 👨‍👩‍👧 \n\t"\\', "naïve café", "Ω≈ç√∫"])
def test_strings_beyond_ascii_survive(llama: LlamaBackend, value: str) -> None:
    params = SamplingParams(constraint=json_schema_constraint({"const": {"text": value}}, "p"), temperature=2.0, seed=3)
    tokens, end = generate(llama, params, most=100)
    assert (json.loads(text_of(llama, tokens)), end) == ({"text": value}, "complete")


def test_control_tokens_come_only_where_a_constraint_names_them(llama: LlamaBackend) -> None:
    start = mark(llama.vocab, "<|im_start|>")
    assert isinstance(start, Control)
    bias = ((start.token, 100.0),)
    text = SamplingParams(constraint=render(Chain((Literal("<|im_start|>"), start))), logit_bias=bias)
    tokens, end = generate(llama, text)
    assert (text_of(llama, tokens), tokens.index(start.token), end) == ("<|im_start|>", len(tokens) - 1, "complete")
    until = SamplingParams(constraint=render(Until(Literal("\n"))), logit_bias=bias, ignore_eos=True)
    assert start.token not in generate(llama, until, most=30)[0]


def test_a_resumed_answer_goes_on_within_its_constraint(llama: LlamaBackend) -> None:
    params = SamplingParams(constraint=json_schema_constraint(PERSON, "p"), temperature=1.0, seed=4)
    whole, _ = generate(llama, params, most=200, prompt=ASK_JSON)
    for split in (1, len(whole) // 2):
        tokens, end = generate(llama, params, most=500, prompt=ASK_JSON, earlier=tuple(whole[:split]))
        assert tokens[:split] == whole[:split] and end == "complete"
        assert is_person(json.loads(text_of(llama, tokens)))
    with pytest.raises(GrammarDeadEnd):
        generate(llama, params, earlier=(whole[0], whole[0], 5))


def test_the_mask_is_what_the_tests_of_single_tokens_say(llama: LlamaBackend) -> None:
    matcher = llama.vocab.constraints.matcher(json_schema_constraint(PERSON, "p"))  # type: ignore[attr-defined]
    for token in [*llama.vocab.tokenize('{"name": "é😀", "kind": "do', parse_special=False)]:
        matcher.accept(token)
    mask = matcher.mask()
    assert mask.shape == (llama.vocab.n_tokens,)
    assert [token for token in range(llama.vocab.n_tokens) if matcher.allows(token)] == np.flatnonzero(mask).tolist()
    assert {llama.vocab.piece(token) for token in np.flatnonzero(mask)} == {b"g"}


def test_one_token_is_tested_before_the_vocabulary(llama: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[int] = []
    mask = Matcher.mask
    monkeypatch.setattr(Matcher, "mask", lambda self: masks.append(1) or mask(self))  # type: ignore[func-returns-value]
    tokens, _ = generate(llama, SamplingParams(constraint=render(Until(Literal("France")))), most=30)
    assert text_of(llama, tokens).endswith("France")
    assert masks == []


@pytest.mark.parametrize(
    ("grammar", "answer", "complete"),
    [
        ('root ::= "é"', "é", True),
        ('root ::= "ab" "c"?', "ab", False),
        ('root ::= "ab" "c"?', "abc", True),
        ("root ::= [0-9]+", "12", False),
        ('root ::= "a" <|im_start|>?', "a", False),
        ('root ::= "a" "日"?', "a", False),
        ('root ::= "a" ', "", False),
    ],
)
def test_a_grammar_is_complete_when_nothing_may_follow(
    llama: LlamaBackend, grammar: str, answer: str, complete: bool
) -> None:
    sampler = llama.new_sampler(SamplingParams(grammar=grammar))
    for token in llama.vocab.tokenize(answer, parse_special=False):
        sampler.accept(token)
    assert sampler.is_complete is complete
    sampler.close()


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (JSON, ""),
        (JSON, '{"a'),
        (JSON, '{"a": 1'),
        (JSON, '{"a": "b"'),
        ("root ::= [^\\n]* [à-ü] .", " x\u00e9"),
        ("root ::= ([a-z]+ | [日-本]) <|im_start|> [0-9]", ""),
        ("root ::= <[777]> <[778]>?", ""),
        ("root ::= !<[36]>+", ""),
    ],
)
def test_a_mask_is_what_the_tests_of_single_tokens_say(llama: LlamaBackend, grammar: str, answer: str) -> None:
    vocab = llama.vocab
    assert isinstance(vocab, LlamaVocab)
    guide = Grammar(vocab, grammar, "root")
    for token in vocab.tokenize(answer, parse_special=False):
        guide.accept(token)
    row = np.random.default_rng(5).normal(0, 6, vocab.n_tokens).astype(np.float32)
    row[sorted(vocab.control - vocab.eog - guide.named)] = -np.inf
    allowed = {token for token in range(vocab.n_tokens) if guide.allows(token)} - set(np.flatnonzero(np.isneginf(row)))
    masked = guide.masked(row, None)
    assert set(np.flatnonzero(np.isfinite(masked))) == allowed
    assert np.array_equal(masked[sorted(allowed)], row[sorted(allowed)])
    for count in (1, 40):
        likeliest = sorted(allowed, key=lambda token: (-row[token], token))[:count]
        masked = guide.masked(row, count)
        assert set(np.flatnonzero(np.isfinite(masked))) <= allowed
        assert np.argsort(-masked, kind="stable")[: len(likeliest)].tolist() == likeliest
    guide.close()


def test_a_token_that_is_refused_is_not_taken(llama: LlamaBackend) -> None:
    vocab = llama.vocab
    assert isinstance(vocab, LlamaVocab)
    for guide in (Grammar(vocab, 'root ::= "no!"', "root"), vocab.constraints.matcher(render(Literal("no!")))):
        yes, no, end = (vocab.tokenize(text, parse_special=False)[0] for text in ("yes", "no", "!"))
        refused = (yes, end, min(vocab.eog), -1, vocab.n_tokens)
        assert [guide.take(token) for token in (*refused, no, no, end)] == [False] * 5 + [True, False, True]
        assert guide.is_complete
        assert guide.take(min(vocab.eog))
        if isinstance(guide, Grammar):
            guide.close()


def test_a_grammar_names_tokens_by_their_numbers(llama: LlamaBackend) -> None:
    tokens, end = generate(llama, SamplingParams(grammar="root ::= <[777]> <[778]>?", ignore_eos=True), most=2)
    assert tokens == [777, 778] and end == "complete"
    sampler = llama.new_sampler(SamplingParams(grammar="root ::= <[777]> <[778]>?"))
    sampler.accept(777)
    assert not sampler.is_complete
    sampler.close()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_control_tokens_that_a_grammar_does_not_name_stay_out_of_the_answer(
    llama: LlamaBackend, ignore_eos: bool
) -> None:
    (start,) = llama.vocab.tokenize("<|im_start|>", parse_special=True)
    params = SamplingParams(
        grammar="root ::= . [^x]{9} | <|im_end|>", logit_bias=((start, 100.0),), ignore_eos=ignore_eos
    )
    assert start not in generate(llama, params)[0]


def test_a_free_answer_is_never_complete(llama: LlamaBackend) -> None:
    sampler = llama.new_sampler(SamplingParams(temperature=1.0))
    sampler.accept(5)
    assert sampler.is_complete is False


def test_samplers_leave_no_memory_behind(llama: LlamaBackend) -> None:
    def make(count: int, params: SamplingParams) -> int:
        for _ in range(count):
            sampler = llama.new_sampler(params)
            sampler.close()
            sampler.close()
        return psutil.Process().memory_info().rss

    grammar = SamplingParams(grammar='root ::= ("a" | "b")*')
    plain = SamplingParams(temperature=0.8, ignore_eos=True)
    constrained = SamplingParams(constraint=json_object_constraint())
    before = make(500, grammar), make(500, constrained)
    make(48_000, plain)
    assert make(2000, grammar) - before[1] < 4 * 2**20
    assert make(2000, constrained) - before[1] < 4 * 2**20
