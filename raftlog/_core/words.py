"""Counts and lists in words, and secrets removed from descriptions and support bundles.

Secrets are passwords and their derivatives, private keys and tokens. The name of a key decides first, then the form of
its value: a key with an unexpected name may hold a private key in PEM, or an address with a password.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return `1 record`, `2,000 records`; `many` is `one` with an s unless it is given."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def some(things: Sequence[object], at_most: int) -> str:
    """Return the first things, and the number of the others: `a, b and 1,000 more`."""
    more = f" and {len(things) - at_most:,} more" if len(things) > at_most else ""
    return ", ".join(map(str, things[:at_most])) + more


HIDDEN: Final = "[hidden]"

_SECRET_NAME: Final = re.compile(
    r"passw(?:or)?d|passphrase|secret|token|credential|jaas|api[._-]?key|private[._-]?key|\bheaders\b"
    r"|\bsalt\b|stored_?key|server_?key|\bauthorization\b"
    r"|\bsasl\.(?!mechanism|enabled\.mechanisms|username|oauthbearer\.)"
    r"|(?:^|\.)keystore\.key$",
    re.IGNORECASE,
)
_PATHS: Final = re.compile(r"\.(?:location|file|path|dir|client\.id)$", re.IGNORECASE)
"""Keys that look like secrets but are none: the path of a secret, and the client id beside it."""
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_QUOTED: Final = r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'"
_INSIDE: Final = (
    (
        re.compile(
            r"(?i)((?:passw(?:or)?d|passphrase|secret|token|credential|api[._-]?key)[\w.-]{0,64}[\"']?\s*[=:]\s*)"
            rf"(?!\[hidden\])(?:{_QUOTED}|[^\s,;}}\])]+)"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(?i)\b((?:salt|stored_?key|server_?key)[\"']?\s*[=:]\s*)"
            rf"(?!\[hidden\])(?:{_QUOTED}|[^\s,;}}\])]+)"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            rf"(?i)\b(authorization[\"']?\s*[:=]\s*)(?!\[hidden\])(?:{_QUOTED}|(?:(?:bearer|basic)\s+)?[^\s,;}}\])]+)"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(\w://[^\s/:@]*):[^\s/]+@"), rf"\1:{HIDDEN}@"),
)
"""Patterns that keep the text before a secret and hide the secret. Each begins with a word and looks ahead by a limited
length, so long lines stay fast."""


def is_secret(key: str) -> bool:
    """Whether the value of this key must never be shown."""
    return bool(_SECRET_NAME.search(key)) and not _PATHS.search(key)


def shown(key: str, value: str) -> str:
    """Return a config value without secrets; an empty value stays empty."""
    return HIDDEN if value and is_secret(key) else without_secrets(value)


def without_secrets(text: str) -> str:
    """Return free text, such as a log line, without everything that looks like a secret."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    for pattern, instead in _INSIDE:
        text = pattern.sub(instead, text)
    return text


def document_without_secrets(value: Any) -> Any:
    """Return a JSON document without everything that looks like a secret, by name or by value."""
    match value:
        case str():
            return without_secrets(value)
        case Mapping():
            return {key: _entry(str(key), each) for key, each in value.items()}
        case list() | tuple():
            return [document_without_secrets(each) for each in value]
        case _:
            return value


def _entry(key: str, value: Any) -> Any:
    return shown(key, value) if isinstance(value, str) else document_without_secrets(value)


def log_lines_without_secrets(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a log without secrets; a private key over several lines is hidden as a whole."""
    yield from without_secrets("\n".join(lines)).split("\n")
