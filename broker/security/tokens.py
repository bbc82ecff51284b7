"""Tokens: what a client shows with every call after it has authenticated. Pure.

A token is known to the process that has issued it, and to no other: its key is made anew by each.

    token     body "." mac, both base64url without padding
    body      JSON: [user, mechanism, version of the credential, end of its time in ms of the process' clock]
    mac       HMAC-SHA256 of the body
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple

from raftmeta.credentials import Credential, Mechanism

LIFETIME_MS: Final = 3_600_000
MAX_TOKEN_CHARS: Final = 4_096
KEY_BYTES: Final = 32
_MAC_CHARS: Final = 43


class Login(NamedTuple):
    """What a token says: who has authenticated with which credential, and until when (`monotonic_ms`) that counts."""

    user: str
    mechanism: Mechanism
    version: int
    expires_ms: int


class Tokens:
    """Issues tokens, and tells its own from others."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key

    def issue(self, credential: Credential, now_ms: float) -> str:
        """Return a token for who has just shown that they know the password; `now_ms` is monotonic."""
        login = Login(credential.user, credential.mechanism, credential.version, int(now_ms) + LIFETIME_MS)
        body = _encode(json.dumps(login, separators=(",", ":"), ensure_ascii=False).encode())
        return f"{body}.{self._mac(body)}"

    def read(self, token: str) -> Login | None:
        """Return what a token says, None if it is not of this process. Whether it still counts is not looked at."""
        body, _, mac = token.rpartition(".")
        if len(token) > MAX_TOKEN_CHARS or len(mac) != _MAC_CHARS or not token.isascii():
            return None
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        try:
            return Login(*json.loads(urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        except (ValueError, TypeError, binascii.Error):  # cannot be, with the right code over it
            return None

    def _mac(self, body: str) -> str:
        return _encode(hmac.digest(self._key, body.encode(), hashlib.sha256))


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
