from __future__ import annotations

import base64

import pytest

from shared.webhooks.signing import keys_of, signed_headers

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_example_of_the_specification_has_the_signature_it_gives() -> None:
    # *Source:* the test vector of the Standard Webhooks reference libraries.
    headers = signed_headers(keys_of(SECRET), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_several_secrets_all_sign() -> None:
    other = "whsec_" + base64.b64encode(b"k" * 32).decode()
    alone = signed_headers(keys_of(other), "id", 1, b"x")["webhook-signature"]
    both = signed_headers(keys_of(f"{SECRET}  {other}"), "id", 1, b"x")["webhook-signature"]
    assert both.split()[1] == alone
    assert both.split()[0] == signed_headers(keys_of(SECRET), "id", 1, b"x")["webhook-signature"]


@pytest.mark.parametrize(
    "secret", ["secret", "whsec_", "whsec_c2hvcnQ=", "whsec_!!!!" + "A" * 40, "whsec_" + "A" * 88, f"{SECRET} x"]
)
def test_a_secret_of_another_form_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="whsec_"):
        keys_of(secret)


def test_no_secret_is_no_key() -> None:
    assert keys_of("") == keys_of("  ") == ()
