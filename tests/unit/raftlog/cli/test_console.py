"""Which logins `raftlog console` offers, and where it refuses to take a private key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raftlog.console import __main__ as process
from raftlog.console.app import Settings
from raftlog.testing.certificates import CertificateAuthority
from tests.support.command_line import Run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The consoles that would run."""
    found: list[Settings] = []

    def become(settings: Settings, *_: Any) -> None:
        found.append(settings)

    monkeypatch.setattr(process, "become", become)
    return found


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca")


def config_of(path: Path, settings: dict[str, str]) -> str:
    path.write_text("".join(f'"{key}" = "{value}"\n' for key, value in settings.items()))
    return str(path)


def test_people_log_in_with_certificates_only_where_brokers_know_users_by_them(
    run: Run, served: list[Settings], tmp_path: Path, authority: CertificateAuthority
) -> None:
    ca = {"ssl.ca.location": str(authority.ca_file)}
    fits = config_of(tmp_path / "ssl.toml", {"security.protocol": "ssl", **ca})
    ran = run("console", "--client-config", fits, "--certificate-logins")
    assert ran.code == 0, ran.err
    assert [(each.with_login, each.certificates, each.acts_as) for each in served] == [(True, True, "")]
    plain = {"security.protocol": "plaintext"}
    for settings in (plain, {"security.protocol": "sasl_ssl", **ca}, authority.client_config("console")):
        ran = run("console", "--client-config", config_of(tmp_path / "other.toml", settings), "--certificate-logins")
        assert (ran.code, "brings a certificate" in ran.err) == (2, True), ran.err
    assert len(served) == 1


def test_people_log_in_with_passwords_where_the_config_names_no_user(
    run: Run, served: list[Settings], tmp_path: Path, authority: CertificateAuthority
) -> None:
    """As docs/console.md has it."""
    users = {"security.protocol": "sasl_ssl", "ssl.ca.location": str(authority.ca_file)}
    own = {**users, "sasl.username": "ops", "sasl.password": "secret"}
    token = {**users, "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.token.command": "echo token"}
    for settings in (users, own, token):
        ran = run("console", "--client-config", config_of(tmp_path / "client.toml", settings))
        assert ran.code == 0, ran.err
    assert [(each.with_login, each.acts_as) for each in served] == [
        (True, ""),
        (False, "ops"),
        (False, "the user of its token"),
    ]
    assert "sasl.username" not in served[0].client, "the console must have no user of its own, as people log in"
    wrong = {**users, "ssl.ca.location": str(tmp_path / "nowhere.pem"), "request.timeout.ms": "soon"}
    assert "request.timeout.ms" in run("console", "--client-config", config_of(tmp_path / "c.toml", wrong)).err


def test_no_private_key_crosses_the_network_in_the_clear(
    run: Run, served: list[Settings], tmp_path: Path, authority: CertificateAuthority
) -> None:
    settings = {"security.protocol": "ssl", "ssl.ca.location": str(authority.ca_file)}
    asked = ("console", "--client-config", config_of(tmp_path / "ssl.toml", settings), "--certificate-logins")
    ran = run(*asked, "--host", "0.0.0.0", "--insecure")
    assert (ran.code, "private keys" in ran.err) == (2, True), ran.err
    assert run(*asked, "--host", "0.0.0.0", "--behind-https").code == 0
    assert [(each.certificates, each.tls) for each in served] == [(True, True)]
