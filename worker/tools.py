"""How models write tool calls: the syntaxes we know, and how a template's is recognised.

Sources: the published chat templates and model cards of the models named at each syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Form = Literal["marked", "list", "named", "bare"]

#: Some models of the form `named` write an id of their own behind the name.
OWN_ID = "[CALL_ID]"


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One way to write tool calls.

    `begin` opens a call (`marked`, `named`), all calls together (`list`), or may be left out (`bare`). In the form
    `named` the function's name and `separator` come before the arguments; in all others a call is a JSON object
    with `name` and the key `arguments`. `end` closes what `begin` opened; it may be empty.
    """

    name: str
    form: Form
    begin: str
    end: str = ""
    separator: str = ""
    arguments: Literal["arguments", "parameters"] = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        """What the model writes that may be a control token of its vocabulary."""
        own_id = OWN_ID if self.form == "named" else ""
        return tuple(mark for mark in (self.begin, own_id, self.separator, self.end) if mark)

    @property
    def many(self) -> bool:
        """Whether one answer may hold several calls."""
        return self.form != "bare"


#: Qwen 2.5 and 3, Hermes 2 and 3, SmolLM3, Granite 4.
HERMES = ToolSyntax("hermes", "marked", "<tool_call>", "</tool_call>")
#: Llama 3.1 to 3.3: the whole answer is the call.
LLAMA3 = ToolSyntax("llama3", "bare", "<|python_tag|>", arguments="parameters")
#: Mistral 7B v0.3, Mistral Nemo.
MISTRAL = ToolSyntax("mistral", "list", "[TOOL_CALLS]")
#: Mistral Small 3.2, Devstral, Ministral 3.
MISTRAL_NAMED = ToolSyntax("mistral_named", "named", "[TOOL_CALLS]", separator="[ARGS]")

SYNTAXES = (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED)

#: The name of the function whose call `syntax_of` looks for.
PROBE = "probe_function"

_WRITTEN = (
    (HERMES, rf'<tool_call>\s*\{{"name": "{PROBE}", "arguments": \{{'),
    (LLAMA3, rf'(?:^|[>\n])\{{"name": "{PROBE}", "parameters": \{{'),
    (MISTRAL, rf'\[TOOL_CALLS\]\s*\[\{{"name": "{PROBE}", "arguments": \{{'),
    (MISTRAL_NAMED, rf"\[TOOL_CALLS\]{PROBE}(?:\[CALL_ID\]\w+)?\[ARGS\]\{{"),
)


def syntax_of(text: str) -> ToolSyntax | None:
    """The syntax in which a call of the function `PROBE` is written at the end of a text."""
    return next((syntax for syntax, pattern in _WRITTEN if re.search(pattern, text)), None)
