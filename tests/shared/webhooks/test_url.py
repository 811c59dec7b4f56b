from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from shared.webhooks.url import WebhookUrl

URL = TypeAdapter(WebhookUrl)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "http://example.com:8080/a/b?token=x&y=%20",
        "https://xn--bcher-kva.example/",
        "http://[2606:4700::1]/hook",
        "https://example.com/" + "a" * 2028,
    ],
)
def test_urls_that_can_be_sent_to_are_taken_as_they_are(url: str) -> None:
    assert URL.validate_python(url) == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "at least 1 character"),
        ("example.com/hook", "http://"),
        ("ftp://example.com", "http://"),
        ("file:///etc/passwd", "http://"),
        ("https://", "name a host"),
        ("https:///path", "name a host"),
        ("https://example.com:0/", "port 0"),
        ("https://example.com:99999/", "not a URL"),
        ("https://example.com:port/", "not a URL"),
        ("https://[::1/", "not a URL"),
        ("https://" + "a" * 64 + ".example/", "not a URL"),
        ("https://a..example/", "not a URL"),
        ("https://user@example.com/", "user name"),
        ("https://user:word@example.com/", "user name"),
        ("https://example.com/#part", "fragment"),
        ("https://example.com/a b", "ASCII"),
        ("https://example.com/\r\nHost: other", "ASCII"),
        ("https://example.com/ü", "ASCII"),
        ("https://public.example\\@internal/", "backslash"),
        ("https://example.com/" + "a" * 2029, "at most 2048"),
    ],
)
def test_others_are_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        URL.validate_python(url)
