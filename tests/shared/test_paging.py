from __future__ import annotations

import pytest
import redis

from shared import paging
from shared.paging import pages

INDEX = "index"


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch, client: redis.Redis) -> None:
    monkeypatch.setattr(paging, "PAGE", 2)
    client.zadd(INDEX, {str(n): n for n in range(5)})


@pytest.mark.parametrize(("oldest_first", "order"), [(True, "01234"), (False, "43210")])
def test_every_id_comes_once_in_order(client: redis.Redis, oldest_first: bool, order: str) -> None:
    found = list(pages(client, INDEX, oldest_first=oldest_first))
    assert "".join(sum(found, [])) == order
    assert [len(page) for page in found] == [2, 2, 1]
    assert list(pages(client, INDEX, after=order[3], oldest_first=oldest_first)) == [[order[4]]]


def test_ids_that_come_and_go_meanwhile_move_nothing(client: redis.Redis) -> None:
    found = pages(client, INDEX)
    assert next(found) == ["4", "3"]
    client.zadd(INDEX, {"5": 5, "6": 6})
    client.zrem(INDEX, "3")
    assert next(found) == ["2", "1"]
    assert next(found) == ["0"]


def test_an_unknown_place_to_go_on_from_is_told(client: redis.Redis) -> None:
    with pytest.raises(KeyError):
        next(pages(client, INDEX, after="none"))
