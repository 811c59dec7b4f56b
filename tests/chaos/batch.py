"""One large batch whose processes are killed by `kill -9` at random moments, and a count of its rows.

    make chaos-batch                     20,000 lines, everything killed twice
    make chaos-batch ARGS="--lines 2000 --kills 5 --seed 7"

Exit status 0 where every line has exactly one row, with its own answer, and nothing of its jobs is left.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from shared.batches.records import BatchRecord
from shared.batches.store import BatchStore
from shared.connection import connect
from shared.files import FileStore
from shared.names import JOBS_INDEX
from shared.settings import BatchSettings, load
from shared.storage import storage_of
from tests.processes import Service, WorkerProcess, eventually, new_valkey

CHAT = "/v1/chat/completions"
#: Without a new row for so long, the run has failed.
STALLED_S = 120.0


class Chaos:
    """The processes, and the batch they work on."""

    def __init__(self, redis_url: str, folder: Path, lines: int) -> None:
        self._url = redis_url
        self._folder = folder
        self._settings = load(BatchSettings, {"redis_url": redis_url, "files_url": str(folder / "files")})
        self._client: Any = connect(self._settings)
        self._batches = BatchStore(self._client, self._settings)
        self._files = FileStore(self._client, storage_of(self._settings), self._settings)
        self._lines = lines
        self._id = ""

    def start(self) -> None:
        """Start a worker and a process of batches."""
        self._worker = WorkerProcess(self._client, self._url, self._folder, name="echo", n_parallel=16)
        self._service = Service("batches", self._url, self._folder, files_url=str(self._folder / "files"))

    def kill(self) -> None:
        """End both at once, as a power cut would."""
        self._service.kill()
        self._worker.kill()

    def stop(self) -> None:
        """End both well."""
        self._service.stop()
        self._worker.stop()
        self._client.close()

    def submit(self) -> None:
        """Make the batch: each line asks to repeat its number, some many times."""
        with self._files.upload() as upload:
            for number in range(self._lines):
                upload.write(json.dumps(_line(number)).encode() + b"\n")
        file = self._files.register(upload, "input.jsonl")
        self._id = self._batches.create(file.id, CHAT, "24h").id

    def now(self) -> BatchRecord:
        """The batch's state."""
        return self._batches.get(self._id)

    def until(self, rows: int) -> None:
        """Wait until so many lines have a row, for as long as there are new ones."""
        seen, since = -1, time.monotonic()
        while not (batch := self.now()).is_ended and batch.completed + batch.failed < rows:
            if batch.completed + batch.failed != seen:
                seen, since = batch.completed + batch.failed, time.monotonic()
            assert time.monotonic() - since < STALLED_S, f"nothing new after {seen} rows: {self._service.log()[-2000:]}"
            time.sleep(0.05)

    def until_ended(self) -> None:
        """Wait for the end of the batch and of the clearing up."""
        self.until(self._lines + 1)
        eventually(lambda: self._client.zcard(JOBS_INDEX) == 0, "the jobs are gone", 30)

    def faults(self) -> list[str]:
        """What is wrong with the results."""
        batch = self.now()
        rows = self._rows(batch)
        times = Counter(row["custom_id"] for row in rows)
        wrong = [row["custom_id"] for row in rows if _answer(row) != _text(int(row["custom_id"][3:]))]
        found = {
            f"the batch is {batch.status}": batch.status != "completed",
            f"{len(rows)} rows": len(rows) != self._lines,
            f"{len(times)} different lines": len(times) != self._lines,
            f"counts {batch.completed}/{batch.failed}/{batch.total}": batch.completed != self._lines,
            f"{len(wrong)} answers under another's name, such as {wrong[:3]}": bool(wrong),
        }
        return [fault for fault, is_there in found.items() if is_there]

    def _rows(self, batch: BatchRecord) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            _, chunks = self._files.content(file_id)
            rows += map(json.loads, b"".join(chunks).splitlines())
        return rows


def _text(number: int) -> str:
    return " ".join([f"number {number}"] * (1 + number % 5))


def _line(number: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": _text(number)}], "temperature": 0}
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}


def _answer(row: dict[str, Any]) -> str | None:
    choices = ((row["response"] or {}).get("body") or {}).get("choices")
    return choices[0]["message"]["content"] if choices else None


def run(lines: int, kills: int, seed: int) -> int:
    """Run it; returns the exit status."""
    chance = random.Random(seed)
    moments = sorted(chance.uniform(0.02, 0.95) for _ in range(kills))
    print(f"{lines} lines, killed after {[round(m * lines) for m in moments]} rows (seed {seed})", flush=True)
    with new_valkey() as server, tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(server.connection_url, Path(folder), lines)
        chaos.start()
        began = time.monotonic()
        chaos.submit()
        try:
            for moment in moments:
                chaos.until(round(moment * lines))
                chaos.kill()
                print(f"killed everything at {chaos.now().completed} rows", flush=True)
                chaos.start()
            chaos.until_ended()
            faults = chaos.faults()
        except (AssertionError, redis.RedisError) as error:
            faults = [str(error)]
        finally:
            chaos.stop()
    took_s = time.monotonic() - began
    print("\n".join(faults) or f"exactly {lines} rows, each once, in {took_s:.0f} s", flush=True)
    return 1 if faults else 0


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    given = parser.parse_args()
    return run(given.lines, given.kills, given.seed)


if __name__ == "__main__":
    raise SystemExit(main())
