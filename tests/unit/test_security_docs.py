"""docs/security.md: certificates as it makes them, files as it has them, and what each operation allows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from broker.config.config import BROKER_CONFIGS, BrokerConfig
from broker.net.tls import NodeTls
from broker.security.permissions import RULES
from broker.security.users import read_passwords
from raftlog._client.options import ADMIN_KEYS, AdminOptions
from raftlog._client.security import ChannelTls
from raftlog.cli import apply
from raftlog.cli.client_config import settings_for, using
from raftlog.cli.security import acls

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page is about openssl")
def test_openssl_as_the_page_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run(["bash", "-e", "-c", blocks[0]], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    NodeTls(
        BrokerConfig.from_values(
            {
                "node.id": 1,
                "log.dirs": "data",
                "controller.quorum.voters": "1@127.0.0.1:19093",
                "advertised.listeners": "broker-1.example",
                "listener.security.protocol": "ssl",
                "ssl.keystore.location": "node-1.pem",
                "ssl.keystore.key.location": "node-1-key.pem",
                "ssl.truststore.location": "ca.pem",
            }
        )
    )
    settings = {
        "security.protocol": "ssl",
        "ssl.ca.location": "ca.pem",
        "ssl.certificate.location": "client.pem",
        "ssl.key.location": "client-key.pem",
    }
    pem = AdminOptions.make(settings, {}).pem
    assert pem is not None
    assert ChannelTls(pem).version == 1


def toml(first: str) -> str:
    """Return the block of the page that begins with this comment."""
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (str(block) for block in blocks if block.startswith(first))
    return found


def test_files_of_servers_are_taken(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    servers = [block for block in blocks if "listener.security.protocol" in block]
    assert len(servers) == 2
    for block in servers:
        BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **BROKER_CONFIGS.from_toml(block)})
    users = tmp_path / "users.toml"
    users.write_text(toml("# /etc/raftlog/users.toml"))
    assert read_passwords(users) == {"admin": "a long password"}


def test_files_of_clients_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "client.toml"
    for block, protocol in ((toml("# client.toml; if"), "sasl_ssl"), (toml('# client.toml\n"'), "ssl")):
        file.write_text(block)
        with using(file):
            settings = settings_for(ADMIN_KEYS)
        assert settings["security.protocol"] == protocol
        assert (AdminOptions.make(settings, {}).sasl is not None) == (protocol == "sasl_ssl")


def test_files_for_tokens_are_taken(tmp_path: Path) -> None:
    server = toml("# server.toml, on every broker") + toml("# server.toml: a further part")
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **BROKER_CONFIGS.from_toml(server)})
    assert config.sasl_oauthbearer_expected_audience == ("raftlog",)
    file = tmp_path / "client.toml"
    file.write_text(toml("# client.toml: tokens of the issuer"))
    with using(file):
        sasl = AdminOptions.make(settings_for(ADMIN_KEYS), {}).sasl
    assert sasl is not None
    assert sasl.tokens is not None


def test_the_file_to_apply_is_taken(tmp_path: Path) -> None:
    (tmp_path / "orders.password").write_text("secret")
    file = tmp_path / "cluster.toml"
    file.write_text(toml("# cluster.toml"))
    wanted = apply.read(file)
    assert [each.name for each in wanted.topics] == [each.name for each in wanted.users] == ["orders"]
    assert wanted.acls is not None
    assert [acls.sentence(each) for each in wanted.acls] == [
        "User:orders may Write topic orders",
        "User:orders may Describe topic orders",
    ]


def test_the_table_of_operations_has_every_call_and_every_operation() -> None:
    section = PAGE.read_text().split("### What each operation allows")[1].split("\n###")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| ([A-Z][A-Za-z, ]+) \| .* \| (.*) \|$", section, re.MULTILINE)
    named = {call for _, _, calls in rows for call in re.findall(r"`(\w+)`", calls)}
    named |= {"DescribeCluster", "ApiVersions", "Authenticate"}
    assert named == {method.rpartition("/")[2] for method in RULES}
    operations = {(kind, each) for kind, those, _ in rows for each in those.split(", ") if each != "operation"}
    assert operations == {
        (acls.word(kind).replace("-", " "), acls.word(each))
        for kind, those in acls.OPERATIONS.items()
        for each in those
    }
