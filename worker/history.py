"""How a chat template takes the tool calls of earlier turns, found out by letting it render some.

Templates differ: most take the arguments of a call as a dictionary, some as JSON text; some fail on a content of None
beside a call, others write an empty turn where it is not None; Mistral's want ids of nine letters and digits. The way
a template writes an earlier call is also the way its model writes new ones.
*Source:* the differences are those for which llama.cpp probes templates as well.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.errors import ChatTemplateError
from worker.plain_text import Variables
from worker.tools import PROBE, ToolSyntax, syntax_of

_KEY, _VALUE = "probe_key", "probe_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "A key."}},
            "required": [_KEY],
        },
    },
}


@dataclass(frozen=True, slots=True)
class History:
    """What a template wants of messages with tool calls.

    Attributes:
        arguments_as_text: arguments are JSON text, not a dictionary.
        null_content: a call without content has the content None, not an empty text.
        short_ids: ids of calls are nine letters and digits.
        syntax: how the template writes calls; None where it is no way we can read.
    """

    arguments_as_text: bool = False
    null_content: bool = False
    short_ids: bool = False
    syntax: ToolSyntax | None = None

    def message(self, message: dict[str, Any], param: str) -> dict[str, Any]:
        """A message as the template wants it, from one as in OpenAI's API.

        Raises:
            ChatTemplateError: the arguments of a call are no JSON object.
        """
        made = dict(message)
        if "tool_call_id" in made:
            made["tool_call_id"] = self._id(made["tool_call_id"])
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [self._call(call, f"{param}.tool_calls.{i}") for i, call in enumerate(calls)]
            if not made.get("content"):
                made["content"] = None if self.null_content else ""
        return made

    def _call(self, call: dict[str, Any], param: str) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if not self.arguments_as_text:
            arguments = _object(arguments, f"{param}.function.arguments")
        function = {"name": function["name"], "arguments": arguments}
        return {"id": self._id(call["id"]), "type": "function", "function": function}

    def _id(self, given: str) -> str:
        if not self.short_ids or (len(given) == 9 and given.isalnum()):
            return given
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def find_history(render: Callable[[Variables], str | None]) -> History:
    """Find out what a template wants.

    Args:
        render: renders variables, or returns None where the template fails.
    """
    for short, as_text, null in itertools.product((False, True), repeat=3):
        tried = History(arguments_as_text=as_text, null_content=not null, short_ids=short)
        text = render({"messages": _messages(tried), "tools": [_TOOL]})
        if text is not None and _is_whole(text):
            return History(as_text, not null, short, syntax_of(text))
    return History()


def _messages(history: History) -> list[dict[str, Any]]:
    function = {"name": PROBE, "arguments": json.dumps({_KEY: _VALUE})}
    call = {"id": "call_probe_0", "type": "function", "function": function}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Probe."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Probed."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]
    return [history.message(turn, "messages") for turn in turns]


def _is_whole(text: str) -> bool:
    """Whether the call is written out, and not as Python writes a dictionary, or as JSON within JSON."""
    call = text[max(0, text.rfind(_VALUE) - 200) :]
    ill = (f"'{_KEY}'", f'\\"{_KEY}\\"', "None")
    return _VALUE in call and not any(i in call for i in ill)


def _object(arguments: str, param: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ChatTemplateError(f"`{param}` is not the text of a JSON object", param)
    return found
