"""Has the command's own options looked at once, before every line fails for them."""

from __future__ import annotations

from slotline.batch.lines import JOBS, Line, Rules
from slotline.batch.problems import BadInput, Problem
from slotline.batch.runner import Runner

LOOK_S = 0.25

#: The probe is one token long, and whoever typed the command waits for it.
PRIORITY = "interactive"


def check_options(runner: Runner, rules: Rules) -> None:
    """Run one short job with the options, such as a schema or a grammar; nothing else may be under way.

    Raises:
        BadInput: one of them is refused, so no line could be served.
        RunnerLost: nothing can be run.
    """
    if not rules.options:
        return
    shortest = min(1, rules.options.get("max_tokens", 1))
    runner.start(Line(0, {}, JOBS, {"prompt": "a", **rules.options, "max_tokens": shortest, "priority": PRIORITY}))
    while not (outcomes := runner.ended(LOOK_S)):
        pass
    error = outcomes[0].error or {}
    # Whatever else goes wrong with it is of its prompt, or of the moment, and the lines may fare better.
    if str(error.get("param")).partition(".")[0] in rules.options:
        raise BadInput([Problem(None, f"the options of the command cannot be served: {error['message']}")])
