"""What becomes of the fields of OpenAI's API that are not served: one table for each endpoint.

`docs/openai.md` lists them, and a test keeps the lists equal.
*Source:* the parameter types of the `openai` SDK, and the names of options in the documentation of llama.cpp's
server and of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.errors import InvalidRequest, UnsupportedField
from shared.validation import unknown


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields that an endpoint takes beside those it serves.

    `refused` would change the answer: field to what to do instead. `neutral` are values of refused fields that ask
    for what is done anyway. `ignored` cannot change the answer.
    """

    refused: Mapping[str, str]
    neutral: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def served(self, body: Mapping[str, Any], served: Iterable[str]) -> dict[str, Any]:
        """The fields of a body that are to be looked at: those given, null meaning left out.

        Raises:
            UnsupportedField: names the field and what to do instead.
            InvalidRequest: there is no such field.
        """
        served = list(served)
        known = {*served, *self.refused, *self.ignored}
        kept = {}
        for name, value in body.items():
            if name not in known:
                raise InvalidRequest(unknown(name, served), name)
            if value is None or name in self.ignored:
                continue
            if name in self.refused:
                self._refuse(name, value)
                continue
            kept[name] = value
        return kept

    def _refuse(self, name: str, value: Any) -> None:
        if name in self.neutral and value == self.neutral[name] and type(value) is type(self.neutral[name]):
            return
        raise UnsupportedField(f"`{name}` is not served: {self.refused[name]}", name)


#: Options of other servers that change the answer.
ELSEWHERE = {
    "n_predict": "give `max_tokens`",
    "t_max_predict_ms": "give `timeout_s`",
    "n_probs": "give `logprobs`",
    "json_schema": "give `response_format`",
    "guided_json": "give `response_format`",
    "guided_grammar": "give `grammar`",
    "samplers": "the order of the samplers is fixed",
    "typical_p": "give `top_p` or `min_p`",
    "dynatemp_range": "give `temperature`",
    "mirostat": "give `temperature`, `top_p` or `min_p`",
    "xtc_probability": "give `temperature`, `top_p` or `min_p`",
    "dry_multiplier": "give `frequency_penalty` or `repeat_penalty`",
    "repetition_penalty": "give `repeat_penalty`",
    "repeat_last_n": "penalties look back 64 tokens",
    "n_keep": "a prompt is never cut",
    "truncate_prompt_tokens": "a prompt is never cut",
    "lora": "start a worker on the model with its adapter",
}

CHAT = FieldTable(
    refused={
        "audio": "answers are text",
        "enable_thinking": "give it in `chat_template_kwargs`",
        "function_call": "give `tool_choice`",
        "functions": "give `tools`",
        "modalities": "answers are text",
        "moderation": "nothing is moderated",
        "prediction": "answers are not predicted",
        "reasoning_format": "reasoning comes as `reasoning_content`",
        "verbosity": "say in the messages how long the answer is to be",
        "web_search_options": "nothing is searched; give `tools`",
    }
    | ELSEWHERE,
    neutral={"modalities": ["text"], "verbosity": "medium", "function_call": "none"},
    ignored=frozenset(
        {
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
        }
    ),
)

COMPLETIONS = FieldTable(
    refused={
        "echo": "put the prompt before the answer yourself",
        "suffix": "nothing is inserted between texts",
        "tools": "give it to `/v1/chat/completions`",
    }
    | ELSEWHERE,
    neutral={"echo": False, "suffix": ""},
    ignored=CHAT.ignored,
)

EMBEDDINGS = FieldTable(
    refused={
        "embd_normalize": "embeddings have length 1",
        "input_type": "put the model's instruction before the input",
        "truncate_prompt_tokens": ELSEWHERE["truncate_prompt_tokens"],
    },
)
