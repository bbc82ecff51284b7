"""What is kept out of descriptions and support bundles: passwords, what is kept of them, private keys, tokens.

Names decide first, then what a value looks like: a key that nobody thought of may hold a private key in PEM, or an
address with a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

HIDDEN: Final = "[hidden]"

_SECRET_NAME: Final = re.compile(
    r"passw(?:or)?d|passphrase|secret|token|credential|jaas|api[._-]?key|private[._-]?key|\bheaders\b"
    r"|\bsalt\b|stored_?key|server_?key|\bauthorization\b|\bsasl\.(?!mechanism|enabled\.mechanisms|username)"
    r"|(?:^|\.)keystore\.key$",
    re.IGNORECASE,
)
_PATHS: Final = re.compile(r"\.(?:location|file|path|dir)$", re.IGNORECASE)
"""Where a secret lies is none."""
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
"""What stands before a secret is kept. Each begins with a word, and looks only so far: a long line takes no time."""


def is_secret(key: str) -> bool:
    """Whether what is set under this name is never to be shown."""
    return bool(_SECRET_NAME.search(key)) and not _PATHS.search(key)


def shown(key: str, value: str) -> str:
    """Return a config value as it may be shown; an empty one hides nothing."""
    return HIDDEN if value and is_secret(key) else without_secrets(value)


def without_secrets(text: str) -> str:
    """Return free text, a line of a log for instance, without what looks like a secret in it."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    for pattern, instead in _INSIDE:
        text = pattern.sub(instead, text)
    return text


def document_without_secrets(value: Any) -> Any:
    """Return a JSON document without what looks like a secret, by names and by values."""
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
    """Yield the lines of a log; a private key over several of them is hidden as a whole."""
    yield from without_secrets("\n".join(lines)).split("\n")
