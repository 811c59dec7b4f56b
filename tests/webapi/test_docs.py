from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flask import Flask
from flask.testing import FlaskClient

import webapi


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def documented_events() -> list[str]:
    """The names in the table of events of the page on streams."""
    page = (Path(webapi.__file__).parent.parent / "docs" / "streams.md").read_text("utf-8")
    return re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)


def test_every_endpoint_is_described(app: Flask, http: FlaskClient) -> None:
    spec = http.get("/openapi.json").json
    described = {(verb.upper(), path) for path, item in spec["paths"].items() for verb in item}
    routed = {
        (method, re.sub("<(?:.+?:)?(.+?)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert described == routed - {("GET", "/openapi.json"), ("GET", "/docs")}


def test_every_reference_leads_somewhere(http: FlaskClient) -> None:
    spec = http.get("/openapi.json").json
    known = {f"#/components/schemas/{name}" for name in spec["components"]["schemas"]}
    used = set(references(spec))
    assert used
    assert used <= known


def test_bodies_answers_and_events_have_their_schemas(http: FlaskClient) -> None:
    paths = http.get("/openapi.json").json["paths"]
    submit = paths["/v1/jobs"]["post"]
    assert submit["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/JobRequest")
    for status, model in {"202": "JobObject", "429": "ErrorResponse", "400": "ErrorResponse"}.items():
        assert submit["responses"][status]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{model}")
    assert {p["name"] for p in submit["parameters"]} == {"wait", "Idempotency-Key"}
    stream = paths["/v1/jobs/{job_id}/events"]["get"]
    events = stream["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]["oneOf"]
    described = {e["properties"]["event"]["const"]: e["properties"] for e in events}
    assert list(described) == documented_events()
    assert {name for name, properties in described.items() if "id" in properties} == {"token", "gap", "done", "failed"}
    assert {p["name"] for p in stream["parameters"]} == {"job_id", "after", "Last-Event-ID"}


def test_the_openai_style_endpoints_have_their_schemas(http: FlaskClient) -> None:
    spec = http.get("/openapi.json").json
    for path, model in {
        "/v1/chat/completions": "ChatRequest",
        "/v1/completions": "CompletionRequest",
        "/v1/embeddings": "EmbeddingRequest",
    }.items():
        operation = spec["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{model}")
        assert "X-Slotline-Job-Id" in operation["responses"]["200"]["headers"]
        assert operation["responses"]["503"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorResponse")
    assert "messages" in spec["components"]["schemas"]["ChatRequest"]["properties"]
    assert "reasoning_content" in spec["components"]["schemas"]["TokenEvent"]["properties"]


def test_the_page_lists_the_endpoints_and_needs_nothing_from_elsewhere(http: FlaskClient) -> None:
    answer = http.get("/docs")
    assert answer.status_code == 200
    assert "/v1/jobs/{job_id}/events" in answer.text
    assert "/v1/chat/completions" in answer.text
    assert re.findall(r"""(?:src|href)=["'](?!/|#)""", answer.text) == []
    assert "http://" not in answer.text and "https://" not in answer.text
