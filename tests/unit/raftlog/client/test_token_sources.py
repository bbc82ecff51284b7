"""Where a client gets its JSON Web Tokens, and what it says if it gets none."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from raftlog._client.options import AdminOptions
from raftlog._client.security import TokenSource
from raftlog.errors import AuthenticationFailed, BrokerUnavailable, InvalidConfig
from tests.support.issuer import web_server


def options(**keys: object) -> AdminOptions:
    named = {f"sasl.oauthbearer.{name.replace('_', '.')}": value for name, value in keys.items()}
    return AdminOptions.make({"security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER", **named}, {})


def test_a_file_is_read_for_every_login(tmp_path: Path) -> None:
    path = tmp_path / "a token"
    path.write_text("first\n")
    source = TokenSource(path.as_uri())
    source.check()
    assert source.read() == "first"
    path.write_text("second")
    assert source.read() == "second"
    for content in ("", "two\nlines", "é", "x" * 20_000):
        path.write_text(content)
        with pytest.raises(InvalidConfig, match=r"token\.endpoint\.url=.* gives no token"):
            source.read()
    path.unlink()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        source.read()


def test_a_command_prints_one() -> None:
    assert TokenSource(command="printf 'a %s' token").read() == "a token"
    with pytest.raises(InvalidConfig, match=r"token\.command=.* ended with 2: .*oops"):
        TokenSource(command="sh -c 'echo oops >&2; exit 2'").read()
    with pytest.raises(InvalidConfig, match="cannot be run"):
        TokenSource(command="/no/such/program").read()
    with pytest.raises(InvalidConfig, match="cannot be run"):
        TokenSource(command="'unbalanced").read()
    with pytest.raises(InvalidConfig, match="gives no token"):
        TokenSource(command="true").read()


def test_an_issuer_is_asked_with_the_clients_id_and_secret() -> None:
    seen = []

    def answer(path: str, headers: dict[str, str], body: str) -> tuple[int, dict[str, str], str]:
        seen.append((path, headers["Authorization"], body))
        match path:
            case "/token":
                return 200, {}, json.dumps({"access_token": "abc", "expires_in": 60})
            case "/refuses":
                return 401, {}, "{}"
            case "/away":
                return 307, {"Location": "/token"}, ""
            case _:
                return 200, {}, "[]"

    with web_server(answer) as base:
        source = TokenSource(f"{base}/token", "", "me:", "s %", "produce consume")
        source.check()
        assert source.read() == "abc"
        path, authorization, body = seen.pop()
        assert path == "/token"
        assert base64.b64decode(authorization.removeprefix("Basic ")) == b"me%3A:s%20%25"
        assert body == "grant_type=client_credentials&scope=produce+consume"
        with pytest.raises(AuthenticationFailed, match="refuses the client 'me' with the status 401"):
            TokenSource(f"{base}/refuses", "", "me", "secret").read()
        seen.clear()
        with pytest.raises(BrokerUnavailable, match="status 307"):
            TokenSource(f"{base}/away", "", "me", "secret").read()
        assert [path for path, _, _ in seen] == ["/away"], (
            "the client followed a redirect, which may carry the secret to another host"
        )
        with pytest.raises(InvalidConfig, match="gives no token"):
            TokenSource(f"{base}/other", "", "me", "secret").read()
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        TokenSource(f"{base}/token", "", "me", "secret").read()
    assert "secret" not in repr(TokenSource("https://a/b", "", "me", "secret"))


def test_options_become_a_source_and_show_no_secret() -> None:
    made = options(
        token_endpoint_url="https://issuer.test/token",
        client_credentials_client_id="me",
        client_credentials_client_secret="hidden",
        scope="a",
    )
    assert made.sasl is not None
    assert made.sasl.tokens == TokenSource("https://issuer.test/token", "", "me", "hidden", "a")
    assert "hidden" not in repr(made)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "takes tokens from one place"),
        ({"token_command": "x", "token_endpoint_url": "file:///x"}, "takes tokens from one place"),
        ({"token_endpoint_url": "https://issuer.test/token"}, "an issuer asks for both"),
        ({"token_endpoint_url": "http://issuer.test/token", "client_credentials_client_id": "a"}, "write https"),
        ({"token_endpoint_url": "file:///x", "client_credentials_client_id": "a"}, "is for an issuer"),
    ],
)
def test_options_that_do_not_go_together_are_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        options(**keys)


def test_a_user_and_a_token_exclude_one_another() -> None:
    base = {"security.protocol": "sasl_ssl", "sasl.oauthbearer.token.command": "x"}
    with pytest.raises(InvalidConfig, match="the token names the user"):
        AdminOptions.make({**base, "sasl.mechanism": "OAUTHBEARER", "sasl.username": "a"}, {})
    with pytest.raises(InvalidConfig, match="has no effect without"):
        AdminOptions.make({**base, "sasl.username": "a", "sasl.password": "b"}, {})
