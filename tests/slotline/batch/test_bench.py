from __future__ import annotations

import pytest

from slotline.batch.bench import Work, compare

WORK = Work(lines=24, rounds=2, slots=4, prompt_tokens=30, max_tokens=6, temperature=0.0)


def test_prompts_are_of_about_the_length_that_is_asked_for_and_begin_differently() -> None:
    prompts = [prompt for number in range(WORK.rounds) for prompt in WORK.prompts(number)]
    assert len(set(prompts)) == WORK.lines
    assert len({prompt.split()[0] for prompt in prompts}) == WORK.lines
    assert {len(prompt.split()) for prompt in prompts} == {29}


@pytest.mark.integration
def test_both_are_measured_in_every_round() -> None:
    said: list[str] = []
    figures = compare("fake:echo", WORK, said.append)
    assert len(figures.ratios) == 2
    assert figures.engine_tok_s > 0
    assert figures.batch_tok_s > 0
    assert min(figures.ratios) <= figures.ratio <= max(figures.ratios)
    assert len([line for line in said if line.startswith("round ")]) == 2
