"""Signatures of webhooks. *Source:* the Standard Webhooks specification, symmetric signatures (`v1`)."""

from __future__ import annotations

import base64
import hmac

PREFIX = "whsec_"
MIN_BYTES, MAX_BYTES = 24, 64


def keys_of(secrets: str) -> tuple[bytes, ...]:
    """The keys in one secret or several, separated by spaces; none in an empty text.

    Raises:
        ValueError: one is not `whsec_` with the base64 of 24 to 64 bytes behind it.
    """
    return tuple(_key_of(secret) for secret in secrets.split())


def _key_of(secret: str) -> bytes:
    rule = f"must be {PREFIX} and the base64 of {MIN_BYTES} to {MAX_BYTES} bytes; several are separated by spaces"
    if not secret.startswith(PREFIX):
        raise ValueError(rule)
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except ValueError:
        raise ValueError(rule) from None
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(rule)
    return key


def signed_headers(keys: tuple[bytes, ...], webhook_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of one attempt, with a signature of each key.

    Args:
        keys: of all secrets, so that a receiver may know the old or the new one while they change.
        webhook_id: the same in every attempt.
        timestamp: seconds since 1970, of this attempt: receivers refuse what is older than some minutes.
        body: exactly what is sent.
    """
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
