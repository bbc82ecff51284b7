"""Where commands have the settings of their clients from: a file, variables, or a server's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from raftlog._client.options import ADMIN_KEYS, PRODUCER_KEYS, SECURITY_KEYS, AdminOptions
from raftlog.cli.app import tree
from raftlog.cli.client_config import add_to, default_to, settings_for, using
from raftlog.cli.output import BootstrapOption
from raftlog.errors import InvalidConfig

SSL = 'security.protocol = "ssl"\nssl.ca.location = "ca.pem"\n'


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAFTLOG_CLIENT_CONFIG", *(f"RAFTLOG_{key.variable}" for key in SECURITY_KEYS)):
        monkeypatch.delenv(variable, raising=False)


def _file(directory: Path, text: str) -> Path:
    path = directory / "client.toml"
    path.write_text(text)
    return path


def test_without_any_there_are_none() -> None:
    assert settings_for(ADMIN_KEYS) == {}


def test_each_kind_of_client_takes_what_it_has(tmp_path: Path) -> None:
    path = _file(tmp_path, SSL + "linger_ms = 3\n")
    with using(path):
        assert settings_for(ADMIN_KEYS) == {"security.protocol": "ssl", "ssl.ca.location": "ca.pem"}
        assert settings_for(PRODUCER_KEYS)["linger.ms"] == 3
    assert settings_for(ADMIN_KEYS) == {}


def test_tables_mean_the_same_as_dots(tmp_path: Path) -> None:
    with using(_file(tmp_path, '[ssl]\nca.location = "x"\n')):
        assert settings_for(ADMIN_KEYS) == {"ssl.ca.location": "x"}


def test_variables_win_over_the_file_and_that_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTLOG_SSL_CA_LOCATION", "of-variable")
    monkeypatch.setenv("RAFTLOG_SSL_KEY_LOCATION", "")
    with using(_file(tmp_path, SSL)):
        default_to({"ssl.ca.location": "of-server", "security.protocol": "plaintext", "ssl.key.location": "of-server"})
        assert settings_for(ADMIN_KEYS) == {
            "security.protocol": "ssl",
            "ssl.ca.location": "of-variable",
            "ssl.key.location": "of-server",
        }
    assert "ssl.key.location" not in settings_for(ADMIN_KEYS), "the defaults must not outlive the command"


def test_who_logs_in_may_come_from_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTLOG_SECURITY_PROTOCOL", "sasl_ssl")
    monkeypatch.setenv("RAFTLOG_SASL_USERNAME", "ada")
    monkeypatch.setenv("RAFTLOG_SASL_PASSWORD_LOCATION", "ada.password")
    monkeypatch.setenv("RAFTLOG_SASL_MECHANISM", "SCRAM-SHA-256")
    with using(_file(tmp_path, 'sasl.username = "bob"\nsasl.password.location = "bob.password"\n')):
        found = settings_for(ADMIN_KEYS)
    assert found == {
        "security.protocol": "sasl_ssl",
        "sasl.username": "ada",
        "sasl.password.location": "ada.password",
        "sasl.mechanism": "SCRAM-SHA-256",
    }
    assert AdminOptions.make(found, {}).sasl is not None


def test_a_password_takes_the_place_of_the_one_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as a text in one place and as a file in another, the SDK would refuse both together."""
    path = _file(tmp_path, 'sasl.username = "of-file"\nsasl.password.location = "of-file"\n')
    with using(path):
        default_to({"sasl.username": "of-server", "sasl.password": "of-server"})
        assert settings_for(ADMIN_KEYS) == {"sasl.username": "of-file", "sasl.password.location": "of-file"}
    path.write_text('sasl.password = "of-file"\n')
    monkeypatch.setenv("RAFTLOG_SASL_PASSWORD_LOCATION", "of-variable")
    with using(path):
        assert settings_for(ADMIN_KEYS) == {"sasl.password.location": "of-variable"}


def test_a_password_is_taken_from_a_file_but_from_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(_file(tmp_path, 'sasl.password = "s3cret"\n')):
        assert settings_for(ADMIN_KEYS) == {"sasl.password": "s3cret"}
    monkeypatch.setenv("RAFTLOG_SASL_PASSWORD", "s3cret")
    with pytest.raises(InvalidConfig, match="RAFTLOG_SASL_PASSWORD_LOCATION") as caught:
        settings_for(ADMIN_KEYS)
    assert "s3cret" not in str(caught.value)
    monkeypatch.setenv("RAFTLOG_SASL_PASSWORD", "")  # as unset
    assert settings_for(ADMIN_KEYS) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssl.ca.locatoin = 'x'", "unknown client option 'ssl.ca.locatoin'; did you mean 'ssl.ca.location'?"),
        ("ssl.truststore.location = 'x'", "ssl.ca.location names a PEM file"),
        ("session.timeout.ms = 1", "group.consumer.session.timeout.ms in their configuration"),
        ("= 1", "is not valid TOML"),
    ],
)
def test_a_file_that_is_wrong_says_what(tmp_path: Path, text: str, words: str) -> None:
    with using(_file(tmp_path, text)), pytest.raises(InvalidConfig) as caught:
        settings_for(ADMIN_KEYS)
    assert words in str(caught.value)
    assert str(tmp_path / "client.toml") in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with using(tmp_path / "none.toml"), pytest.raises(InvalidConfig, match=r"none\.toml cannot be read: No such file"):
        settings_for(ADMIN_KEYS)


def test_commands_that_talk_to_a_cluster_take_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer = typer.Typer(), typer.Typer()
    seen: list[tuple[object, ...]] = []

    @inner.command()
    def ask(topic: str, bootstrap: BootstrapOption = "a:1", loud: Annotated[bool, typer.Option()] = False) -> None:
        seen.append((topic, bootstrap, loud, settings_for(ADMIN_KEYS)))

    @inner.command()
    def stay() -> None:
        seen.append(())

    @inner.callback(invoke_without_command=True)
    def show(context: typer.Context, bootstrap: BootstrapOption = "a:1") -> None:
        if context.invoked_subcommand is None:
            seen.append((bootstrap, settings_for(ADMIN_KEYS)))

    outer.add_typer(inner, name="in")
    add_to(outer)
    add_to(outer)  # twice is once
    path = str(_file(tmp_path, SSL))
    run = CliRunner().invoke
    found = {"security.protocol": "ssl", "ssl.ca.location": "ca.pem"}
    assert run(outer, ["in", "ask", "t", "--client-config", path, "--loud"]).exit_code == 0
    monkeypatch.setenv("RAFTLOG_CLIENT_CONFIG", path)
    assert run(outer, ["in", "ask", "t", "-b", "b:2"]).exit_code == 0
    assert seen == [("t", "a:1", True, found), ("t", "b:2", False, found)]
    seen.clear()
    assert run(outer, ["in", "-b", "b:2"]).exit_code == 0
    monkeypatch.delenv("RAFTLOG_CLIENT_CONFIG")
    assert run(outer, ["in", "--client-config", path]).exit_code == 0
    assert seen == [("b:2", found), ("a:1", found)]
    assert run(outer, ["in", "stay", "--client-config", path]).exit_code == 2


def _options(command: Any, path: str = "raftlog") -> dict[str, dict[str, Any]]:
    """Return the options of every command, by name: those too that have commands below them."""
    found = {path: {name: option for option in command.params for name in option.opts}}
    for name, below in getattr(command, "commands", {}).items():
        found |= _options(below, f"{path} {name}")
    return found


def test_everything_with_an_address_has_it() -> None:
    with_address = {
        path: options for path, options in _options(typer.main.get_command(tree())).items() if "--bootstrap" in options
    }
    assert len(with_address) > 20
    assert {"raftlog cluster features", "raftlog cluster features upgrade"} <= with_address.keys()
    assert [path for path, options in with_address.items() if "--client-config" not in options] == []
    assert {options["--client-config"].envvar for options in with_address.values()} == {"RAFTLOG_CLIENT_CONFIG"}


def test_an_option_of_features_that_upgrade_would_not_see_is_refused(tmp_path: Path) -> None:
    said = CliRunner().invoke(
        tree(), ["cluster", "features", "--client-config", str(tmp_path / "none.toml"), "upgrade"]
    )
    assert said.exit_code == 2
    assert "--client-config" in said.output
    assert "after upgrade" in said.output
