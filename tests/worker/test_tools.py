from __future__ import annotations

import json

import pytest

from worker.tools import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, PROBE, ToolSyntax, syntax_of

ARGS = '{"probe_key": "probe_value"}'
CALL = f'{{"name": "{PROBE}", "arguments": {ARGS}}}'


@pytest.mark.parametrize(
    ("written", "syntax"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", HERMES),
        (f"<|end_header_id|>\n\n{CALL.replace('arguments', 'parameters')}<|eot_id|>", LLAMA3),
        (f'[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}]</s>', MISTRAL),
        (f"[TOOL_CALLS]{PROBE}[ARGS]{ARGS}</s>", MISTRAL_NAMED),
        (f"[TOOL_CALLS]{PROBE}[CALL_ID]abcdefghi[ARGS]{ARGS}</s>", MISTRAL_NAMED),
        (f"<tool_call>\n<function={PROBE}>\n<parameter=probe_key>\nprobe_value\n</parameter>", None),
        (f"<function={PROBE}>{ARGS}</function>", None),
        (f"<tool_call>{json.dumps(CALL)}</tool_call>", None),
        ("", None),
    ],
)
def test_the_syntax_is_recognised_by_a_written_call(written: str, syntax: ToolSyntax | None) -> None:
    assert syntax_of(written) == syntax


def test_a_syntax_names_every_mark_that_may_be_a_control_token() -> None:
    assert HERMES.marks == ("<tool_call>", "</tool_call>")
    assert MISTRAL_NAMED.marks == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    assert LLAMA3.marks == ("<|python_tag|>",)


def test_only_a_call_without_a_mark_is_alone_in_its_answer() -> None:
    assert [syntax.many for syntax in (HERMES, MISTRAL, MISTRAL_NAMED, LLAMA3)] == [True, True, True, False]
