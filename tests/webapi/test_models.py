from __future__ import annotations

import redis
from flask.testing import FlaskClient

from shared.settings import Settings
from tests.webapi.conftest import ScriptedWorker
from webapi.models import ModelList


def test_models_are_listed_with_what_a_caller_must_know(
    http: FlaskClient, client: redis.Redis, settings: Settings, worker: ScriptedWorker
) -> None:
    ScriptedWorker(client, settings, "large", "w2").register(alias="big", has_chat_template=False)
    worker.report()
    answer = http.get("/v1/models")
    tiny, large = ModelList.model_validate_json(answer.data).data
    assert (tiny.id, tiny.owned_by, tiny.n_ctx, tiny.max_request_tokens) == ("tiny", "slotline", 1024, 512)
    assert (tiny.has_chat_template, tiny.live_workers) == (True, 1)
    assert (large.id, large.alias, large.has_chat_template, large.live_workers) == ("large", "big", False, 0)
    assert tiny.created > 1_700_000_000


def test_without_models_the_list_is_empty(http: FlaskClient) -> None:
    assert http.get("/v1/models").json == {"object": "list", "data": []}
