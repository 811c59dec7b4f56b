"""What the endpoints share in how they are described in OpenAPI, and how their parameters are read."""

from __future__ import annotations

from functools import cache
from typing import Any

from flask_openapi.blueprint import APIBlueprint
from flask_openapi.models.media_type import MediaType
from flask_openapi.models.reference import Reference
from flask_openapi.models.request_body import RequestBody
from flask_openapi.models.schema import Schema
from pydantic import BaseModel, ConfigDict

from shared.results import ErrorResponse

REF = "#/components/schemas/{model}"

#: Answers that any endpoint may give.
COMMON: dict[Any, Any] = {400: ErrorResponse, 500: ErrorResponse, 503: ErrorResponse}


class Parameters(BaseModel):
    """Parameters of a path, a query or a header. The OpenAPI library asks for the schema at each request."""

    @classmethod
    @cache
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The schema, made once."""
        return super().model_json_schema(*args, **kwargs)


class Query(Parameters):
    """Parameters of a query; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


def blueprint(name: str, tag: str) -> APIBlueprint:
    """A blueprint whose endpoints are listed under a tag and may give the common errors."""
    return APIBlueprint(name, __name__, abp_tags=[{"name": tag}], abp_responses=COMMON)


def add_schema(bp: APIBlueprint, model: type[BaseModel]) -> str:
    """Describe a model among the components and return the reference to it."""
    schema = model.model_json_schema(ref_template=REF)
    for name, definition in schema.pop("$defs", {}).items():
        bp.components_schemas[name] = Schema(**definition)
    bp.components_schemas[model.__name__] = Schema(**schema)
    return REF.format(model=model.__name__)


def body_of(bp: APIBlueprint, model: type[BaseModel]) -> RequestBody:
    """The description of a JSON body. Bodies are read by `validation.read_body`, not by the OpenAPI library."""
    content = {"application/json": MediaType(schema=Reference(**{"$ref": add_schema(bp, model)}))}
    return RequestBody(content=content, required=True)


def event_stream(bp: APIBlueprint, events: dict[str, type[BaseModel]], ids: dict[str, Any]) -> dict[str, Any]:
    """The description of an event stream.

    Args:
        bp: the blueprint to describe the data of the events in.
        events: name of each event and the model of its data.
        ids: schema of `id` of the events that have one.
    """
    items = [_event(name, add_schema(bp, model), ids.get(name)) for name, model in events.items()]
    return {
        "description": "Server-Sent Events; `data` is always one line of JSON.",
        "content": {"text/event-stream": {"itemSchema": {"oneOf": items}}},
    }


def _event(name: str, reference: str, event_id: dict[str, Any] | None) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "event": {"const": name},
        "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"$ref": reference}},
    }
    if event_id is not None:
        properties["id"] = event_id
    return {"type": "object", "required": list(properties), "properties": properties}
