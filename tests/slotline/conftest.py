from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slotline import Client
from tests.slotline.scripted import ScriptedServer, answer, job


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees a server, or data, of the one who runs it."""
    home = tmp_path / "data"
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(home))
    monkeypatch.delenv("SLOTLINE_URL", raising=False)
    return home


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.on("POST", "/v1/jobs", answer(job("queued"), 202))
        yield server


@pytest.fixture
def api(server: ScriptedServer) -> Iterator[Client]:
    with Client(server.url, timeout=8) as client:
        yield client


@pytest.fixture
def waits(api: Client, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits the client asked for; none of them takes any time."""
    asked: list[float] = []
    monkeypatch.setattr(api._transport, "sleep", asked.append)
    return asked
