"""The HTTP side: takes jobs, shows them, streams their events. It knows no model and imports no worker."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from flask import Flask, Response, request
from flask_openapi.models.info import Info
from flask_openapi.openapi import OpenAPI

from shared.results import ErrorResponse
from shared.settings import WebSettings
from webapi import batches, docs, errors, events, files, health, jobs, models, openai, stats, tokens, webhooks
from webapi.services import EXTENSION, Services, services, services_of
from webapi.validation import refuse


def create_app(settings: WebSettings) -> Flask:
    """The WSGI app. Make it in the process that serves it: its connections do not survive a fork."""
    app = OpenAPI(
        __name__,
        info=Info(title="Slotline", version=_version(), description="A durable task queue for language models."),
        doc_ui=False,
        validation_error_status=400,
        validation_error_model=ErrorResponse,
        validation_error_callback=refuse,
        static_folder=None,
        openapi_extensions={"webhooks": webhooks.described()},
    )
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.json.compact = True  # type: ignore[attr-defined]
    # A doubled slash is a wrong address, not a reason for a redirect page.
    app.url_map.merge_slashes = False
    app.extensions[EXTENSION] = Services.build(settings)
    services_of(app).webhooks.start()
    services_of(app).deadlines.enter()
    errors.register(app)
    for module in (jobs, events, openai, files, batches, tokens, models, stats, health, webhooks):
        app.register_api(module.bp)
    app.register_blueprint(docs.bp)
    app.after_request(_count)
    return app


def _count(response: Response) -> Response:
    route = request.url_rule.rule if request.url_rule else "unmatched"
    services().metrics.count(request.method, route, response.status_code)
    return response


def _version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:
        return "0"
