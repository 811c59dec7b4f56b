from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.batches import checking
from shared.batches.checking import MAX_ERRORS, Checked, InputCheck, repeated
from shared.batches.lines import BOM, MAX_CUSTOM_ID
from shared.errors import UnknownModel
from shared.settings import BatchSettings, load

URL = "/v1/chat/completions"
MISSING = object()


def request(custom_id: Any = "a", method: Any = "POST", url: Any = URL, body: Any = MISSING) -> bytes:
    """A line of the common kind, with one field as given or left out."""
    if body is MISSING:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": body}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def resolve(name: str | None) -> str:
    if name not in (None, "default", "m", "alias", "other"):
        raise UnknownModel(f"there is no model {name!r}", "model")
    return "other" if name == "other" else "m"


def check(data: bytes, on_line: Callable[[], None] = lambda: None, **settings: Any) -> Checked:
    limits = load(BatchSettings, settings)
    return InputCheck(URL, limits, resolve, on_line).run(lambda: io.BytesIO(data))


def found(data: bytes, **settings: Any) -> list[tuple[str, int | None, str | None]]:
    return [(e["code"], e["line"], e["param"]) for e in check(data, **settings).to_dicts()]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n", b" \t\r\n\n"])
@pytest.mark.parametrize("start", [b"", BOM, b"\n", BOM + b"\r\n"])
def test_blank_lines_and_line_ends_of_any_kind_do_not_count(start: bytes, end: bytes, last: bytes) -> None:
    data = start + request("a") + end + end + b"  \t" + end + request("b") + last
    checked = check(data)
    assert (checked.total, checked.errors, checked.model) == (2, [], "m")


def test_numbers_of_lines_are_those_of_an_editor() -> None:
    data = b"\n" + request("a") + b"\r\n \n" + request("b") + b"\n\n[]"
    assert found(data) == [("invalid_request", 6, None)]


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"{'custom_id': 1}", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (b"[" * 200_000, "invalid_json_line", None),
        (rb'{"a": "\ud800"}', "invalid_json_line", None),
        (b"1" * 5_000, "invalid_json_line", None),
        (b"\xff\xfe{\x00", "invalid_encoding", None),
        (b"[1,2]", "invalid_request", None),
        (b'"x"', "invalid_request", None),
        (b"null", "invalid_request", None),
        (b"7", "invalid_request", None),
        (b'{"custom_id":"z","body":"text"}', "missing_required_parameter", "method"),
        (b"{}", "missing_custom_id", "custom_id"),
        (request(None), "missing_custom_id", "custom_id"),
        (request(""), "missing_custom_id", "custom_id"),
        (request(7), "invalid_custom_id", "custom_id"),
        (request(["z"]), "invalid_custom_id", "custom_id"),
        (request("z" * (MAX_CUSTOM_ID + 1)), "invalid_custom_id", "custom_id"),
        (request("z" * 10_000), "invalid_custom_id", "custom_id"),
        (request("z", method=None), "missing_required_parameter", "method"),
        (request("z", method="GET"), "invalid_method", "method"),
        (request("z", method="post"), "invalid_method", "method"),
        (request("z", url=None), "missing_required_parameter", "url"),
        (request("z", url=7), "invalid_url", "url"),
        (request("z", url="/v1/completions"), "url_mismatch", "url"),
        (request("z", body=None), "missing_required_parameter", "body"),
        (request("z", body="text"), "invalid_body", "body"),
        (request("z", body={"stream": True}), "stream_not_supported", "body.stream"),
        (request("z", body={"stream": 1}), "stream_not_supported", "body.stream"),
        (request("z", body={"model": 7}), "invalid_model", "body.model"),
        (request("z", body={"model": "nobody"}), "model_not_found", "body.model"),
        (request("z", body={"model": "other"}), "model_mismatch", "body.model"),
        (request("a"), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_broken_line_is_named_with_its_number(line: bytes, code: str, param: str | None) -> None:
    data = b"\n".join([request("a"), b"", line, request("b")])
    assert found(data) == [(code, 3, param)]


@pytest.mark.parametrize(
    "line",
    [
        request("é😀"),
        request("z" * MAX_CUSTOM_ID),
        request("z", body={}),
        request("z", body={"stream": False}),
        request("z", body={"stream": None, "temperature": "hot", "model": None}),
        request("z", body={"model": "alias"}),
    ],
)
def test_what_only_the_body_is_to_blame_for_does_not_fail_the_batch(line: bytes) -> None:
    assert found(request("a") + b"\n" + line) == []


def test_every_bad_line_is_listed_in_order() -> None:
    data = b"\n".join([request("a"), b"[1,2]", b'"x"', request("a"), b"null", request("a", url=None), request("b")])
    assert found(data) == [
        ("invalid_request", 2, None),
        ("invalid_request", 3, None),
        ("duplicate_custom_id", 4, "custom_id"),
        ("invalid_request", 5, None),
        ("missing_required_parameter", 6, "url"),
    ]


@pytest.mark.parametrize("data", [b"", b"\n", b" \n\t\r\n\n", BOM])
def test_an_input_without_requests_is_refused(data: bytes) -> None:
    assert found(data) == [("empty_file", None, None)]


def test_one_request_too_many_is_refused() -> None:
    data = b"\n\n".join(request(str(i)) for i in range(4))
    assert found(data, batch_max_lines=4) == []
    assert found(data, batch_max_lines=3) == [("too_many_tasks", None, None)]


def test_a_line_too_long_is_refused_and_never_held_whole() -> None:
    class Stream(io.BytesIO):
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            data = super().readline(size)
            self.longest = max(self.longest, len(data))
            return data

    exact = request("a")
    stream = Stream(exact + b"\n" + request("b", body={"prompt": "x" * 500_000}) + b"\n" + request("c"))
    limits = load(BatchSettings, {"batch_max_line_bytes": len(exact)})
    checked = InputCheck(URL, limits, resolve).run(lambda: stream)
    assert [(e.code, e.line) for e in checked.errors] == [("line_too_long", 2)]
    assert checked.total == 3 and stream.longest <= 1 << 16


def test_a_file_full_of_errors_is_not_read_to_its_end() -> None:
    read = 0

    def on_line() -> None:
        nonlocal read
        read += 1

    listed = check(b"[]\n" * 1000, on_line).to_dicts()
    assert read == MAX_ERRORS + 1
    assert [e["line"] for e in listed[:-1]] == list(range(1, MAX_ERRORS + 1))
    assert listed[-1]["code"] == "too_many_errors" and listed[-1]["line"] is None


def test_ids_whose_hashes_agree_are_compared_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_hash", lambda custom_id: len(custom_id))
    data = b"\n".join(request(custom_id) for custom_id in ("a", "b", "cc", "b", "dd"))
    assert found(data) == [("duplicate_custom_id", 4, "custom_id")]


def test_a_repeat_is_found_among_very_many() -> None:
    hashes = [*range(100_000), 7, 99_999, 7]
    assert repeated(hashes) == {7, 99_999}
