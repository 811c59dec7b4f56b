"""`/openapi.json`, and `/docs`: a page that lists it and needs nothing from elsewhere."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, current_app, jsonify, render_template_string

bp = Blueprint("docs", __name__)

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ info.title }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  summary { cursor: pointer; padding: .4rem 0; }
  code { font-size: 95%; }
  .verb { display: inline-block; min-width: 5rem; font-weight: 600; }
  table { border-collapse: collapse; margin: .5rem 0; }
  td { border: 1px solid #8884; padding: .2rem .6rem; vertical-align: top; }
  pre { overflow: auto; background: #8881; padding: .8rem; }
</style>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>{{ info.description }} Everything here is from <a href="/openapi.json">/openapi.json</a>.</p>
{% for tag, operations in groups.items() %}
<h2>{{ tag }}</h2>
{% for verb, path, op in operations %}
<details>
  <summary><span class="verb">{{ verb.upper() }}</span><code>{{ path }}</code> {{ op.summary }}</summary>
  <p>{{ op.description | default("") | replace("<br/>", " ") }}</p>
  <table>
    {% for p in op.parameters %}
    <tr><td><code>{{ p.name }}</code></td><td>{{ p.in }}</td><td>{{ p.description }}</td></tr>
    {% endfor %}
    {% if op.requestBody %}
    <tr><td>body</td><td colspan="2">{{ names(op.requestBody) | join(", ") }}</td></tr>
    {% endif %}
    {% for status, answer in op.responses.items() %}
    <tr><td>{{ status }}</td><td colspan="2">{{ names(answer) | join(", ") or answer.description }}</td></tr>
    {% endfor %}
  </table>
</details>
{% endfor %}
{% endfor %}
<h2>Schemas</h2>
{% for name, schema in schemas.items() %}
<details id="{{ name }}"><summary><code>{{ name }}</code></summary><pre>{{ schema | tojson(indent=2) }}</pre></details>
{% endfor %}
</html>
"""


@bp.get("/openapi.json")
def openapi() -> Response:
    """The description of every endpoint."""
    return jsonify(_spec())


@bp.get("/docs")
def docs() -> str:
    """The same for people."""
    spec = _spec()
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, item in spec["paths"].items():
        for verb, operation in item.items():
            groups.setdefault(operation["tags"][0], []).append((verb, path, operation))
    schemas = spec["components"]["schemas"]
    return render_template_string(PAGE, info=spec["info"], groups=groups, schemas=schemas, names=_names)


def _spec() -> dict[str, Any]:
    found: dict[str, Any] = current_app.api_doc  # type: ignore[attr-defined]
    return found


def _names(described: dict[str, Any]) -> list[str]:
    """Names of the models that a body or an answer may be."""
    found = []
    for content in described.get("content", {}).values():
        reference = content.get("schema", {}).get("$ref", "")
        found += [reference.rsplit("/", 1)[-1]] if reference else []
    return found
