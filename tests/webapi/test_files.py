"""Uploading, listing, reading and deleting files over HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from flask.testing import FlaskClient
from openai.types import FileDeleted, FileObject
from werkzeug.http import parse_options_header
from werkzeug.test import TestResponse

from shared.batches.records import Usage
from shared.batches.schemas import FileObject as OurFileObject
from shared.batches.store import Part
from shared.names import FILE_EXPIRY, FILES, TRASH
from tests.webapi.conftest import MakeApp
from webapi.services import services_of

LINES = b'{"custom_id":"a"}\n{"custom_id":"b"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def http(make_app: MakeApp, folder: Path) -> FlaskClient:
    return make_app(files_url=str(folder), max_file_bytes=1_000_000).test_client()


def send(http: FlaskClient, data: bytes = LINES, name: str = "in.jsonl", **fields: Any) -> TestResponse:
    """Upload; a field that is None is left out."""
    form = {"purpose": "batch", "file": data} | fields
    body = b"".join(part(field, value, name) for field, value in form.items() if value is not None)
    return http.post("/v1/files", data=body + b"--b--\r\n", content_type="multipart/form-data; boundary=b")


def part(field: str, value: str | bytes, filename: str) -> bytes:
    """A part of a form; bytes are a file."""
    named = f'; filename="{filename}"' if isinstance(value, bytes) else ""
    data = value if isinstance(value, bytes) else value.encode()
    return f'--b\r\nContent-Disposition: form-data; name="{field}"{named}\r\n\r\n'.encode() + data + b"\r\n"


def uploaded(http: FlaskClient, data: bytes = LINES, name: str = "in.jsonl", **fields: Any) -> dict[str, Any]:
    answer = send(http, data, name, **fields)
    assert answer.status_code == 200, answer.json
    file: dict[str, Any] = answer.json
    return file


def raw(http: FlaskClient, body: bytes) -> TestResponse:
    """A form written by hand."""
    body = body.replace(b"\n", b"\r\n")
    return http.post("/v1/files", data=body, content_type="multipart/form-data; boundary=b")


def stored(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


# --- upload ---


def test_an_uploaded_file_is_stored_as_it_is(http: FlaskClient, folder: Path) -> None:
    file = uploaded(http)
    ours, theirs = OurFileObject.model_validate(file), FileObject.model_validate(file)
    assert (ours.bytes, ours.filename, ours.purpose, ours.status) == (len(LINES), "in.jsonl", "batch", "processed")
    assert set(FileObject.model_fields) <= set(file)
    assert theirs.expires_at == theirs.created_at + 30 * 86_400
    assert stored(folder) == [f"files/{file['id']}"]
    assert (folder / "files" / file["id"]).read_bytes() == LINES
    assert http.get(f"/v1/files/{file['id']}").json == file


def test_a_large_file_comes_back_byte_for_byte(http: FlaskClient) -> None:
    data = bytes(range(256)) * 3_900 + b"\r\n--\n\r"
    file = uploaded(http, data)
    answer = http.get(f"/v1/files/{file['id']}/content")
    assert answer.data == data
    assert answer.content_length == file["bytes"] == len(data)


def test_an_empty_file_is_a_file(http: FlaskClient) -> None:
    file = uploaded(http, b"")
    answer = http.get(f"/v1/files/{file['id']}/content")
    assert (file["bytes"], answer.status_code, answer.data, answer.content_length) == (0, 200, b"", 0)


@pytest.mark.parametrize("form", ["file first", "purpose first"])
def test_the_fields_may_come_in_any_order(http: FlaskClient, form: str) -> None:
    parts = [
        b'--b\nContent-Disposition: form-data; name="file"; filename="x"\n\nhello\n',
        b'--b\nContent-Disposition: form-data; name="purpose"\n\nbatch\n',
    ]
    body = b"".join(parts if form == "file first" else parts[::-1]) + b"--b--\n"
    answer = raw(http, body)
    assert (answer.status_code, answer.json["bytes"]) == (200, 5)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("ö 漢字 😀.jsonl", "ö 漢字 😀.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\in.jsonl", "in.jsonl"),
        ("a\u202eb\x07c", "abc"),
        ("..", ".."),
        ("\u65e5\u672c \U0001f999.jsonl", "\u65e5\u672c \U0001f999.jsonl"),
        ("folder/", "upload"),
        ("", "upload"),
        ("x" * 255, "x" * 255),
    ],
)
def test_odd_file_names_are_only_names(http: FlaskClient, folder: Path, sent: str, shown: str) -> None:
    form = (
        b'--b\nContent-Disposition: form-data; name="file"; filename="%s"\n\nhello\n'
        b'--b\nContent-Disposition: form-data; name="purpose"\n\nbatch\n--b--\n'
    )
    escaped = sent.replace("\\", "\\\\")
    answer = raw(http, form % escaped.encode())
    assert answer.status_code == 200, answer.json
    assert answer.json["filename"] == shown
    assert stored(folder) == [f"files/{answer.json['id']}"]
    content = http.get(f"/v1/files/{answer.json['id']}/content")
    assert (content.status_code, content.data) == (200, b"hello")
    assert content.headers["Content-Disposition"].startswith("attachment; filename")
    assert content.headers["Content-Disposition"].isascii()


def test_a_name_that_a_header_cannot_say_is_encoded_in_it(http: FlaskClient) -> None:
    file = send(http, name="\u00e9t\u00e9.jsonl").json["id"]
    _, options = parse_options_header(http.get(f"/v1/files/{file}/content").headers["Content-Disposition"])
    assert options["filename"] == "\u00e9t\u00e9.jsonl"


def test_a_very_long_name_is_refused(http: FlaskClient, folder: Path) -> None:
    answer = send(http, name="x" * 256)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "file")
    assert "256 characters" in answer.json["error"]["message"]
    assert stored(folder) == []


@pytest.mark.parametrize("purpose", ["fine-tune", "assistants", "user_data", "Batch", ""])
def test_another_purpose_is_refused_by_name(http: FlaskClient, folder: Path, purpose: str) -> None:
    answer = send(http, purpose=purpose)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "purpose")
    assert "`batch`" in answer.json["error"]["message"]
    assert stored(folder) == []


@pytest.mark.parametrize("field", ["purpose", "file"])
def test_both_fields_are_needed(http: FlaskClient, folder: Path, field: str) -> None:
    answer = send(http, **{field: None})
    assert (answer.status_code, answer.json["error"]["param"]) == (400, field)
    assert stored(folder) == []


def test_an_unknown_field_is_refused_by_name(http: FlaskClient) -> None:
    answer = send(http, porpose="batch")
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "porpose")


def test_a_file_can_expire_when_its_owner_says(http: FlaskClient) -> None:
    file = uploaded(http, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "last_active_at", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after": "3600"}, "expires_after"),
    ],
)
def test_a_bad_expiry_is_refused_by_name(http: FlaskClient, fields: dict[str, str], param: str) -> None:
    answer = send(http, **fields)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, param)


def test_a_file_may_be_as_large_as_the_limit_and_no_larger(make_app: MakeApp, folder: Path) -> None:
    http = make_app(files_url=str(folder), max_file_bytes=100_000).test_client()
    kept = uploaded(http, b"x" * 100_000)
    answer = send(http, b"x" * 100_001)
    assert (answer.status_code, answer.json["error"]["code"]) == (413, "body_too_large")
    assert "SLOTLINE_MAX_FILE_BYTES" in answer.json["error"]["message"]
    assert stored(folder) == [f"files/{kept['id']}"]


def test_a_far_too_large_file_is_refused_before_it_is_read(make_app: MakeApp, folder: Path) -> None:
    http = make_app(files_url=str(folder), max_file_bytes=1000).test_client()

    class Unread(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise AssertionError("the body was read")

    answer = http.post(
        "/v1/files",
        input_stream=Unread(),
        content_type="multipart/form-data; boundary=b",
        environ_overrides={"CONTENT_LENGTH": str(10**9)},
    )
    assert (answer.status_code, answer.json["error"]["param"]) == (413, "file")
    assert stored(folder) == []


def test_a_body_larger_than_a_json_body_may_be_is_a_file_all_the_same(make_app: MakeApp, folder: Path) -> None:
    http = make_app(files_url=str(folder), max_body_bytes=1000).test_client()
    assert uploaded(http, b"x" * 5000)["bytes"] == 5000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form at all",
        b'--b\nContent-Disposition: form-data; name="file"; filename="x"\n\nhello',
        b"--b\n\nhello\n--b--\n",
        b"--b\nContent-Disposition: form-data\n\nhello\n--b--\n",
        b'--b\nContent-Disposition: form-data; name="f\xff"\n\nhello\n--b--\n',
        b'--b\nContent-Disposition: form-data; name="file"\n\nhello\n--b--\n',
        b'--b\nContent-Disposition: form-data; name="purpose"; filename="p"\n\nbatch\n--b--\n',
        b'--b\nContent-Disposition: form-data; name="purpose"\n\n%s\n--b--\n' % (b"x" * 2000),
        b'--b\nContent-Disposition: form-data; name="file"; filename="x"\n\nhello\n' * 2 + b"--b--\n",
    ],
)
def test_a_broken_form_is_refused_and_leaves_nothing(http: FlaskClient, folder: Path, body: bytes) -> None:
    answer = raw(http, body)
    assert answer.status_code == 400, answer.json
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert stored(folder) == []


def test_headers_without_end_are_refused(http: FlaskClient, folder: Path) -> None:
    answer = raw(http, b"--b\nContent-Disposition: form-data; " + b"x" * 400_000)
    assert answer.status_code == 413
    assert stored(folder) == []


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "text/plain; boundary=b"])
def test_something_else_than_a_form_is_415(http: FlaskClient, content_type: str) -> None:
    answer = http.post("/v1/files", data=b"{}", content_type=content_type)
    assert answer.status_code == 415
    assert "multipart/form-data" in answer.json["error"]["message"]


def test_a_page_of_another_site_uploads_nothing(http: FlaskClient, folder: Path) -> None:
    body = part("purpose", "batch", "") + part("file", LINES, "x") + b"--b--\r\n"
    kind = "multipart/form-data; boundary=b"
    answer = http.post("/v1/files", data=body, content_type=kind, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 400
    assert stored(folder) == []


def test_a_connection_that_breaks_leaves_nothing(http: FlaskClient, folder: Path, client: redis.Redis) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 200_000
    answer = http.post(
        "/v1/files",
        input_stream=io.BytesIO(body),
        content_type="multipart/form-data; boundary=b",
        environ_overrides={"CONTENT_LENGTH": "900000"},
    )
    assert answer.status_code == 400
    assert stored(folder) == []
    assert client.zcard(FILES) == 0


# --- look, list ---


def test_files_are_listed_newest_first_page_by_page(http: FlaskClient) -> None:
    made = [uploaded(http, name=f"{n}.jsonl")["id"] for n in range(5)]
    order = [file["id"] for file in http.get("/v1/files?order=asc").json["data"]]
    assert sorted(order) == sorted(made)
    listed = http.get("/v1/files").json
    assert [file["id"] for file in listed["data"]] == order[::-1]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, order[-1], order[0])
    first = http.get("/v1/files?limit=2").json
    assert ([f["id"] for f in first["data"]], first["has_more"]) == (order[:2:-1], True)
    rest = http.get(f"/v1/files?limit=10&after={first['last_id']}").json
    assert ([f["id"] for f in rest["data"]], rest["has_more"]) == (order[2::-1], False)


def test_files_are_listed_by_purpose(http: FlaskClient) -> None:
    file = uploaded(http)["id"]
    assert [f["id"] for f in http.get("/v1/files?purpose=batch").json["data"]] == [file]
    empty = http.get("/v1/files?purpose=batch_output").json
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=10001", "limit"), ("after=no", "after"), ("order=up", "order")]
)
def test_a_bad_list_is_refused_by_name(http: FlaskClient, query: str, param: str) -> None:
    answer = http.get(f"/v1/files?{query}")
    assert (answer.status_code, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("file", ["file-none", "x:parts", "%20", "a" * 500])
@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("GET", "/content"), ("DELETE", "")])
def test_an_unknown_file_is_404_everywhere(http: FlaskClient, file: str, method: str, suffix: str) -> None:
    answer = http.open(f"/v1/files/{file}{suffix}", method=method)
    assert (answer.status_code, answer.json["error"]["code"]) == (404, "file_not_found")


# --- content ---


def test_content_is_never_taken_for_a_page(http: FlaskClient) -> None:
    file = uploaded(http, b"<script>", name="a b;'.html")
    answer = http.get(f"/v1/files/{file['id']}/content")
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert http.head(f"/v1/files/{file['id']}/content").content_length == 8


def test_results_of_a_running_batch_are_the_parts_there_are_by_now(http: FlaskClient) -> None:
    given = services_of(http.application)
    made = http.post(
        "/v1/batches",
        json={"input_file_id": uploaded(http)["id"], "endpoint": "/v1/completions", "completion_window": "24h"},
    )
    batch = made.json["id"]
    fence = given.batches.acquire(batch, "runner", 60) or 0
    given.batches.start(batch, fence, 10, "tiny")
    rows = [json.dumps({"n": n}).encode() + b"\n" for n in range(1, 4)]
    for number, row in enumerate(rows, 1):
        name = f"batches/{batch}/{number}.output.jsonl"
        given.files.put(name, row)
        given.batches.commit_part(batch, fence, [Part("output", name, [number], len(row))], Usage())
        output = http.get(f"/v1/batches/{batch}").json["output_file_id"]
        answer = http.get(f"/v1/files/{output}/content")
        assert answer.data == b"".join(rows[:number])
        assert answer.content_length == http.get(f"/v1/files/{output}").json["bytes"] == number * len(row)
    assert http.get(f"/v1/files/{output}").json["filename"] == f"{batch}_output.jsonl"
    assert http.delete(f"/v1/files/{output}").status_code == 409


# --- delete ---


def test_a_deleted_file_is_gone_for_good(http: FlaskClient, folder: Path, client: redis.Redis) -> None:
    file = uploaded(http)["id"]
    answer = http.delete(f"/v1/files/{file}")
    assert FileDeleted.model_validate(answer.json).deleted
    assert http.get(f"/v1/files/{file}").status_code == 404
    assert http.delete(f"/v1/files/{file}").status_code == 404
    assert stored(folder) == []
    assert [client.zcard(key) for key in (FILES, FILE_EXPIRY, TRASH)] == [0, 0, 0]


# --- a storage that does not work ---


@pytest.fixture(params=["s9://bucket/x", "file in the way"])
def broken(request: pytest.FixtureRequest, make_app: MakeApp, tmp_path: Path) -> Iterator[FlaskClient]:
    url = request.param
    if url == "file in the way":
        (tmp_path / "taken").write_text("")
        url = str(tmp_path / "taken" / "store")
    yield make_app(files_url=url).test_client()


def test_a_storage_that_cannot_be_used_is_told_and_harms_nothing_else(broken: FlaskClient) -> None:
    answer = send(broken)
    assert (answer.status_code, answer.json["error"]["code"]) == (503, "storage_unavailable")
    assert "SLOTLINE_FILES_URL" in answer.json["error"]["message"]
    assert "Retry-After" in answer.headers
    assert broken.get("/v1/files").json["data"] == []


def test_a_file_whose_bytes_are_gone_is_404(http: FlaskClient, folder: Path) -> None:
    file = uploaded(http)["id"]
    (folder / "files" / file).unlink()
    assert http.get(f"/v1/files/{file}/content").status_code == 404
    assert http.delete(f"/v1/files/{file}").status_code == 200
