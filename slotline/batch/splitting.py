"""An input as files that the server takes as batches: OpenAI lines, of one endpoint each, within its limits."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slotline.batch.lines import CHAT, COMPLETIONS, JOBS, Line
from slotline.batch.problems import BadInput, Problem

#: Limits of one batch unless the server has others. *Source:* OpenAI's Batch API.
MAX_LINES, MAX_BYTES = 50_000, 200 * 1024 * 1024


@dataclass(slots=True)
class Piece:
    """Lines of one endpoint in a file that lives until the next piece is asked for."""

    endpoint: str
    file: IO[bytes]
    first: int
    lines: int = 0
    bytes: int = 0

    @property
    def path(self) -> Path:
        """Where the file is."""
        return Path(self.file.name)


def pieces(lines: Iterable[Line | Problem], max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> Iterator[Piece]:
    """Write lines into pieces and give out each when it is full, the rest at the end.

    Raises:
        BadInput: a line alone is too long.
    """
    with ExitStack() as files:
        open_pieces: dict[str, Piece] = {}
        for line in lines:
            if isinstance(line, Problem):
                raise BadInput([line])
            endpoint, data = openai_line(line)
            if len(data) > max_bytes:
                raise BadInput([Problem(line.number, f"has {len(data)} bytes; a batch takes at most {max_bytes}")])
            piece = open_pieces.get(endpoint)
            if piece is not None and (piece.lines >= max_lines or piece.bytes + len(data) > max_bytes):
                yield _closed(piece)
                piece = None
            if piece is None:
                file = files.enter_context(tempfile.NamedTemporaryFile(suffix=".jsonl"))
                piece = open_pieces[endpoint] = Piece(endpoint, file, line.number)
            piece.file.write(data)
            piece.lines += 1
            piece.bytes += len(data)
        for piece in open_pieces.values():
            yield _closed(piece)


def openai_line(line: Line) -> tuple[str, bytes]:
    """The endpoint of a line, and the line as OpenAI's batches have it; the `custom_id` of a plain one is `line-N`."""
    endpoint = line.endpoint
    if endpoint == JOBS:
        endpoint = CHAT if "messages" in line.body else COMPLETIONS
    custom_id = line.custom_id if line.custom_id is not None else f"line-{line.number}"
    request = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": line.body}
    return endpoint, json.dumps(request, ensure_ascii=False).encode() + b"\n"


def _closed(piece: Piece) -> Piece:
    piece.file.flush()
    return piece
