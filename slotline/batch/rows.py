"""What a finished line looks like in the output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slotline.batch.lines import Line

#: What we say of a plain line. A field of its own with such a name is given back with `input_` before it.
OURS = ("line", "text", "finish_reason", "usage", "error", "reasoning_content", "tool_calls", "logprobs")

#: Of these, what is only there where the answer has it.
SOMETIMES = ("reasoning_content", "tool_calls", "logprobs")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a line: the answer of its endpoint (for a plain line its job), or an error.

    `error` is the API's own, `{"message", "type", "code", "param"}`; `status` the HTTP status that goes with it.
    """

    line: Line
    answer: dict[str, Any] | None
    error: dict[str, Any] | None = None
    status: int = 200
    request_id: str = ""

    @property
    def failed(self) -> bool:
        """Whether there is no answer."""
        return self.error is not None

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts, as far as they are known."""
        return (self.answer or {}).get("usage") or {}

    @property
    def cut(self) -> bool:
        """Whether the answer, or one of its choices, ended at the limit of its length."""
        answer = self.answer or {}
        reasons = [answer.get("finish_reason"), *(c.get("finish_reason") for c in answer.get("choices") or ())]
        return not self.failed and "length" in reasons


def row_of(outcome: Outcome, run: str) -> dict[str, Any]:
    """The row for the output; `run` makes the ids of OpenAI rows unlike those of other runs."""
    return _openai_row(outcome, run) if outcome.line.custom_id is not None else _plain_row(outcome)


def encode(row: dict[str, Any]) -> bytes:
    """One line of JSONL."""
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def given_back(fields: dict[str, Any]) -> dict[str, Any]:
    """A plain line's own fields under the names they have in its row."""
    back: dict[str, Any] = {}
    for name, value in fields.items():
        shown = name
        while name in OURS and (shown in fields or shown in back or shown in OURS):
            shown = f"input_{shown}"
        back[shown] = value
    return back


def own_part(row: dict[str, Any]) -> dict[str, Any]:
    """The part of a plain row that came from its line."""
    return {name: value for name, value in row.items() if name not in OURS}


def _plain_row(outcome: Outcome) -> dict[str, Any]:
    answer = outcome.answer or {}
    row = {
        **given_back(outcome.line.fields),
        "line": outcome.line.number,
        "text": answer.get("text"),
        "finish_reason": answer.get("finish_reason"),
        "usage": answer.get("usage"),
        "error": outcome.error,
    }
    return row | {name: answer[name] for name in SOMETIMES if answer.get(name) is not None}


def _openai_row(outcome: Outcome, run: str) -> dict[str, Any]:
    body = {"error": outcome.error} if outcome.failed else outcome.answer
    return {
        "id": f"batch_req_{run}_{outcome.line.number}",
        "custom_id": outcome.line.custom_id,
        "response": {"status_code": outcome.status, "request_id": outcome.request_id, "body": body},
        "error": None,
    }
