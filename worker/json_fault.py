"""Why a JSON schema does not compile: llguidance gives a reason but no place."""

from __future__ import annotations

import itertools
import json
import re

from worker.json_schema import Place, Schema, schema_places
from worker.matcher import compile_error

#: Schemas within a schema that are compiled alone to find the fault, at a few milliseconds each.
MAX_TRIED = 200

_PREFIX = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
_PLAINER = {
    "lookarounds not supported": "the regular expression has an anchor in the middle",
}


def find_fault(schema: Schema, error: str) -> tuple[Place, str]:
    """The place of the keyword on account of which a schema does not compile, and the reason.

    That is the innermost schema with the same error, and in it the first keyword without which it compiles.
    """
    for place, part in itertools.islice(schema_places(schema), MAX_TRIED):
        if isinstance(part, dict) and _reason(_error_alone(schema, part)) == _reason(error):
            special_first = sorted(part, key=("properties", "type").__contains__)
            keys = (
                key for key in special_first if not _error_alone(schema, {k: v for k, v in part.items() if k != key})
            )
            return (*place, *itertools.islice(keys, 1)), _reason(error)
    return (), _reason(error)


def _error_alone(schema: Schema, part: Schema) -> str:
    """Why a part of a schema does not compile, its references kept; empty if it does."""
    whole, alone = (json.dumps(text).replace('"$ref": "#', '"$ref": "#/$defs/whole') for text in (schema, part))
    return compile_error(f'start: %json {{"$ref": "#/$defs/alone", "$defs": {{"whole": {whole}, "alone": {alone}}}}}')


def _reason(error: str) -> str:
    reason = _PREFIX.sub("", error)
    return next((plainer for start, plainer in _PLAINER.items() if reason.startswith(start)), reason)
