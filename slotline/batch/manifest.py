"""`OUT.manifest.json`: what an output was made from, so that only the same run goes on with it."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

VERSION = 1

#: Parts of a fingerprint, as they are named to people.
NAMES = {
    "input": "the input (another size or content)",
    "format": "how the input is read (--format)",
    "model": "the model",
    "template": "--template",
    "system": "--system",
    "chat": "--chat",
    "options": "the sampling options",
    "seed": "--seed",
    "order": "--order",
    "errors": "--errors",
}


class Refused(Exception):
    """The output belongs to something else; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Of one output. `run` names it in the ids of its rows; `is_new` says that nothing has been written yet."""

    run: str
    is_new: bool


def manifest_path(out: Path) -> Path:
    """Where the manifest of an output is."""
    return out.with_name(out.name + ".manifest.json")


@contextmanager
def claim(out: Path, others: Sequence[Path], fingerprint: dict[str, Any], overwrite: bool) -> Iterator[Manifest]:
    """Hold an output for one run and check that it is a beginning of this very one.

    `others` are the files that belong to the output; with `overwrite` all of it is removed. Where none of them holds
    anything, any run may begin.

    Raises:
        Refused: it is not, another run holds it, or it cannot be had.
    """
    path = manifest_path(out)
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another `slotline batch run` is writing {out} now") from None
        file.seek(0)
        text = file.read()
        there = [path for path in (out, *others) if path.exists() and path.stat().st_size > 0]
        if there and not overwrite:
            stored = _read(text)
            if stored is None:
                raise _nobodys(there[0], path, text)
            _compare(out, stored, fingerprint)
            yield Manifest(stored["run"], is_new=False)
        else:
            _clear(there, file)
            yield _begin(file, fingerprint)


def _nobodys(output: Path, manifest: Path, text: str) -> Refused:
    if text:
        return Refused(f"{manifest} is damaged, so {output} may be of any run: give another -o, or --overwrite")
    manifest.unlink()
    return Refused(f"{output} exists and is not the beginning of this run: give another -o, or --overwrite")


def _clear(there: Sequence[Path], manifest: IO[str]) -> None:
    """Make room for a new run. The old manifest goes first: without it, rows that are left are nobody's."""
    manifest.truncate(0)
    for path in there:
        path.unlink()


def _begin(file: IO[str], fingerprint: dict[str, Any]) -> Manifest:
    run = uuid.uuid4().hex[:12]
    json.dump({"version": VERSION, "run": run, **fingerprint}, file, indent=2)
    file.write("\n")
    file.flush()
    os.fsync(file.fileno())
    return Manifest(run, is_new=True)


def _read(text: str) -> dict[str, Any] | None:
    """The stored manifest; None for one that was not written to its end."""
    try:
        stored = json.loads(text)
    except ValueError:
        return None
    return stored if isinstance(stored, dict) and isinstance(stored.get("run"), str) else None


def _compare(out: Path, stored: dict[str, Any], fingerprint: dict[str, Any]) -> None:
    if stored.get("version") != VERSION:
        raise Refused(
            f"{out} was written by another version of slotline, in the format {stored.get('version')!r} instead of "
            f"{VERSION}: give another -o, or --overwrite"
        )
    if fingerprint["input"] is None or stored.get("input") is None:
        raise Refused(
            f"{out} exists, and what comes from standard input or a pipe cannot be resumed: "
            "give another -o, or --overwrite"
        )
    differs = [_difference(name, stored.get(name), fingerprint[name]) for name in NAMES]
    told = [line for line in differs if line]
    if told:
        heading = f"{out} is the output of another run, which differs in:"
        raise Refused("\n".join([heading, *told, "give another -o, --overwrite, or the same options as then"]))


def _difference(name: str, then: Any, now: Any) -> str | None:
    if then == now:
        return None
    if name == "input":
        return f"  {NAMES[name]}"
    if isinstance(then, dict) and isinstance(now, dict):
        parts = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
        changes = ", ".join(f"{key} was {_short(then.get(key))} and is {_short(now.get(key))}" for key in parts)
        return f"  {NAMES[name]}: {changes}"
    return f"  {NAMES[name]}: was {_short(then)} and is {_short(now)}"


def _short(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
