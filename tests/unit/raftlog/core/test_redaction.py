"""What is kept out of descriptions and support bundles."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.config.config import BROKER_CONFIGS
from raftlog._client.options import ADMIN_KEYS, CONSUMER_KEYS, PRODUCER_KEYS
from raftlog._core.words import (
    HIDDEN,
    document_without_secrets,
    is_secret,
    log_lines_without_secrets,
    shown,
    without_secrets,
)

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "key",
    [
        "ssl.key.password",
        "ssl.keystore.password",
        "ssl.truststore.password",
        "ssl.keystore.key",
        "sasl.jaas.config",
        "sasl.password",
        "tracing.exporter.headers",
        "delegation.token.secret.key",
        "api.key",
        "authorization",
        "salt",
        "stored_key",
        "serverKey",
        "RAFTLOG_SSL_KEY_PASSWORD",
    ],
)
def test_these_are_never_shown(key: str) -> None:
    assert is_secret(key)
    assert shown(key, "s3cr3t") == HIDDEN
    assert shown(key, "") == "", "an empty value must be shown, as it is no secret"


@pytest.mark.parametrize(
    "key",
    [
        "ssl.key.location",
        "basalt",
        "ssl.keystore.location",
        "node.id",
        "sasl.mechanism",
        "sasl.enabled.mechanisms",
        "sasl.username",
        "password.file",
        "message.key",
    ],
)
def test_where_a_secret_lies_is_none(key: str) -> None:
    assert not is_secret(key)
    assert shown(key, "/etc/raftlog/tls.key") == "/etc/raftlog/tls.key"


def test_every_setting_that_a_secret_may_be_in_is_hidden_and_no_other() -> None:
    names = {key.name for keys in (BROKER_CONFIGS, ADMIN_KEYS, CONSUMER_KEYS, PRODUCER_KEYS) for key in keys}
    assert len(names) > 100
    hidden = {name for name in names if is_secret(name)}
    assert {name for name in names if "password" in name and not name.endswith(".location")} <= hidden
    assert hidden <= {name for name in names if any(word in name for word in ("password", "header", "token", "secret"))}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("connect to https://joe:hunter2@host:1/x", f"connect to https://joe:{HIDDEN}@host:1/x"),
        ("connect to https://joe:hunter2@x@host:1/x", f"connect to https://joe:{HIDDEN}@host:1/x"),
        ("Authorization: Bearer abc.def", f"Authorization: {HIDDEN}"),
        ('{"authorization": "Bearer abc.def", "a": 1}', f'{{"authorization": {HIDDEN}, "a": 1}}'),
        ('{"password": "hunter2", "a": 1}', f'{{"password": {HIDDEN}, "a": 1}}'),
        (r'{"password": "hunt\"er2", "a": 1}', f'{{"password": {HIDDEN}, "a": 1}}'),
        ("ssl.key.password=hunter2 node.id=1", f"ssl.key.password={HIDDEN} node.id=1"),
        ("[token=abc partition=orders-0]", f"[token={HIDDEN} partition=orders-0]"),
        (f"key is {KEY} so", f"key is {HIDDEN} so"),
        (
            'user: "alice" salt: "\\001 \\002" stored_key: "\\"k" server_key: "a b" iterations: 8192',
            f'user: "alice" salt: {HIDDEN} stored_key: {HIDDEN} server_key: {HIDDEN} iterations: 8192',
        ),
        ('{"storedKey": "YWJj", "user": "alice"}', f'{{"storedKey": {HIDDEN}, "user": "alice"}}'),
        ("ssl.server.key=/tls/key basalt: 1 salted: 2", None),
        ("nothing to hide here: orders-0, 12:30:00, http://host:9/metrics", None),
    ],
)
def test_free_text_is_shown_without_what_looks_like_a_secret(text: str, left: str | None) -> None:
    assert without_secrets(text) == (text if left is None else left)


def test_a_private_key_over_several_lines_of_a_log_is_hidden_also_when_it_is_cut_off() -> None:
    lines = ["before", *KEY.splitlines(), "after", *KEY.splitlines()[:2]]
    assert list(log_lines_without_secrets(lines)) == ["before", HIDDEN, "after", HIDDEN]


def test_documents_are_gone_through_to_the_bottom() -> None:
    document = {"a": [{"ssl.key.password": "x", "n": 1}], "b": ("p=1", KEY), "password": {"kept": True}}
    assert document_without_secrets(document) == {
        "a": [{"ssl.key.password": HIDDEN, "n": 1}],
        "b": ["p=1", HIDDEN],
        "password": {"kept": True},
    }


PIECES = (
    "password",
    "token",
    "Authorization",
    "bearer",
    "=",
    ":",
    " ",
    '"',
    "'",
    "\\",
    "\n",
    "x",
    "]",
    "://u:",
    "@",
    "/",
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join)))
@example("password=hunter2")
@example("Authorization: Bearer abc.def")
def test_what_was_hidden_stays_as_it_is(text: str) -> None:
    once = without_secrets(text)
    assert without_secrets(once) == once


@pytest.mark.parametrize("run", ["a", "token", "secret.", "token='", "a://", "authorization:"])
def test_a_long_line_takes_no_time(run: str) -> None:
    begun_s = time.process_time()
    without_secrets(run * (200_000 // len(run)))
    assert time.process_time() - begun_s < 5, (
        "the line took more than 5 s: the time must not grow with the square of its length"
    )
