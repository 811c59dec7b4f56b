from __future__ import annotations

import pytest
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


def test_models_say_what_they_can_do(http: FlaskClient, worker: ScriptedWorker) -> None:
    worker.register(capabilities=("embeddings",), n_embd=576)
    (tiny,) = ModelList.model_validate_json(http.get("/v1/models").data).data
    assert (tiny.capabilities, tiny.n_embd) == (["embeddings"], 576)
    worker.register(capabilities=("completion", "chat"))
    assert http.get("/v1/models").json["data"][0]["n_embd"] is None


@pytest.mark.parametrize("name", ["team/large:q4", "big"], ids=["slash", "alias"])
def test_one_model_is_shown_as_in_the_list(
    http: FlaskClient, client: redis.Redis, settings: Settings, worker: ScriptedWorker, name: str
) -> None:
    ScriptedWorker(client, settings, "team/large:q4", "w2").register(alias="big")
    answer = http.get(f"/v1/models/{name}")
    assert answer.status_code == 200
    assert answer.json == http.get("/v1/models").json["data"][1]
    assert answer.json["id"] == "team/large:q4"


@pytest.mark.parametrize("name", ["nobody", "nobody/at/all", "default"])
def test_a_model_that_is_not_there_is_404(http: FlaskClient, name: str) -> None:
    answer = http.get(f"/v1/models/{name}")
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "model_not_found")


def test_without_models_the_list_is_empty(http: FlaskClient) -> None:
    assert http.get("/v1/models").json == {"object": "list", "data": []}
