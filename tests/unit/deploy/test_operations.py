"""docs/operations.md names every alert, servers accept its files, and commands on all pages exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperArgument, TyperGroup, TyperOption

from broker.config.config import BrokerConfig
from raftlog.cli.app import tree
from tools.environment import ROOT
from tools.helm import CHART

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
PAGES.append(CHART / "files" / "alerts.yaml")
TEXT = (ROOT / "docs" / "operations.md").read_text()
COMMAND_LINE = typer.main.get_command(tree())


def commands(text: str) -> list[str]:
    """Return what stands in code blocks and between backticks and begins with `raftlog`, without its comment."""
    lines = re.findall(r"^(?: {4}(?: {2})?|\$ )(raftlog .*)$", text, re.MULTILINE)
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        lines += re.findall(r"(?:\$\(|^ *)(raftlog [^|;)#\n]*)", block, re.MULTILINE)
    inline = re.findall(r"`(raftlog [^`]*)`", text)
    found = (re.split(r" #| \| |; |\s>| && |\s{2,}", line)[0].strip() for line in [*lines, *inline])
    return sorted({each.removesuffix(" ...") for each in found})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_and_takes_its_options(page: Path) -> None:
    for line in commands(page.read_text()):
        check(line)


def test_commands_are_found() -> None:
    assert len(commands(TEXT)) > 30
    assert "raftlog broker drain 2" in commands(TEXT)


@pytest.mark.parametrize("line", ["raftlog broker drian 2", "raftlog broker drain 2 --hurry", "raftlog doctor now"])
def test_a_command_that_there_is_not_would_be_noticed(line: str) -> None:
    with pytest.raises(AssertionError):
        check(line)


def check(line: str) -> None:
    """Check that the command line would take this; what stands for values is not looked at."""
    command, rest = COMMAND_LINE, shlex.split(line)[1:]
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, line
        command = command.commands[name]
    options = {each: param for param in command.params for each in (*param.opts, *param.secondary_opts)}
    places = sum(1 if param.nargs > 0 else 1_000 for param in command.params if isinstance(param, TyperArgument))
    while rest:
        token = rest.pop(0)
        if token == "--help":
            return
        if not token.startswith("-"):
            places -= 1
            continue
        name, has_value, _ = token.partition("=")
        assert name in options, f"{line}: the command has no option {token}"
        param = options[name]
        assert isinstance(param, TyperOption)
        if not param.is_flag and not has_value and rest:  # the last one may stand for itself
            rest.pop(0)
    assert places >= 0, f"{line}: the command takes fewer arguments"


def test_every_alert_has_its_row() -> None:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    section = TEXT.split("## Alerts")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| (Raftlog\w+) \|", section, re.MULTILINE)) == alerts


def test_the_script_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    (script,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "roll.sh"
    file.write_text(script)
    subprocess.run(["/bin/sh", "-n", str(file)], check=True)
    assert script.startswith("#!/bin/sh\n")


def test_the_configurations_of_nodes_are_taken(tmp_path: Path) -> None:
    configs = []
    for text in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL):
        file = tmp_path / "server.toml"
        file.write_text(text)
        configs.append(BrokerConfig.load(file=file, environment={}))
    first, added = configs
    assert first.is_controller
    assert first.is_broker
    assert first.controller_quorum_voters[first.node_id] == ("node-1", 9093)
    assert added.is_broker
    assert not added.is_controller
    assert added.controller_quorum_voters == first.controller_quorum_voters
    assert added.cluster_id == first.cluster_id
