"""Which keys for TLS go together, and where plaintext is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from broker.security_keys import super_users
from raftlog.errors import InvalidConfig

VOTERS = "1@10.0.0.1:9093"
KEYSTORE = {"ssl.keystore.location": "node.pem"}
CERTIFICATES = {**KEYSTORE, "ssl.truststore.location": "ca.pem"}
SSL = {"listener.security.protocol": "ssl", **CERTIFICATES}
EVERYWHERE = {"listeners": "10.0.0.1:9092", "controller.quorum.voters": VOTERS}


def config(values: dict[str, object]) -> BrokerConfig:
    return BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **values})


def test_everything_is_plaintext_by_default() -> None:
    made = config({})
    assert made.listener_security_protocol == made.security_inter_broker_protocol == "plaintext"
    assert made.client_settings() == {}


@pytest.mark.parametrize("spelling", ["ssl", "SSL", "Ssl"])
def test_nodes_speak_what_clients_speak_unless_said_otherwise(spelling: str) -> None:
    made = config({**SSL, "listener.security.protocol": spelling})
    assert made.listener_security_protocol == made.security_inter_broker_protocol == "ssl"
    assert made.asks_for_certificates
    assert made.client_settings() == {
        "security.protocol": "ssl",
        "ssl.ca.location": "ca.pem",
        "ssl.certificate.location": "node.pem",
    }
    assert config({**SSL, "security.inter.broker.protocol": "PLAINTEXT"}).security_inter_broker_protocol == "plaintext"


def test_with_tls_listeners_may_be_reached_from_elsewhere() -> None:
    made = config({**EVERYWHERE, **SSL})
    assert not made.insecure


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (EVERYWHERE, r"listeners='10.0.0.1:9092': plaintext .*\(listener.security.protocol = ssl\)"),
        (
            {**EVERYWHERE, **SSL, "security.inter.broker.protocol": "plaintext"},
            r"controller.quorum.voters: this node is at 10.0.0.1:9093: plaintext without authentication",
        ),
        (
            {**EVERYWHERE, **SSL, "listener.security.migration": True},
            r"listener.security.migration=true plaintext is still taken; set it to false, or say with --insecure",
        ),
    ],
)
def test_plaintext_that_others_reach_is_refused_unless_it_is_meant(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        config(values)
    assert config({**values, "insecure": True}).insecure


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"listener.security.protocol": "ssl"}, "ssl.keystore.location is not set, and listener.security.protocol=ssl"),
        ({"listener.security.migration": True}, "ssl.keystore.location is not set, and listener.security.migration"),
        (
            {"security.inter.broker.protocol": "ssl", "controller.quorum.voters": "1@127.0.0.1:9093"},
            "ssl.keystore.location is not set, and ssl between nodes (security.inter.broker.protocol) needs it",
        ),
        (
            {"listener.security.protocol": "ssl", **KEYSTORE},
            "ssl.truststore.location is not set, and ssl.client.auth=required: name the PEM file with the certificate "
            "of the CA that has issued them, or set ssl.client.auth = none",
        ),
        (
            {
                "listener.security.protocol": "ssl",
                **KEYSTORE,
                "ssl.client.auth": "none",
                "controller.quorum.voters": "1@127.0.0.1:9093",
            },
            "ssl.truststore.location is not set, and nodes have to show certificates to each other",
        ),
        ({"ssl.client.auth": "requested"}, "expected one of auto, none, required"),
        ({"listener.security.protocol": "SASL_PLAINTEXT"}, "expected one of plaintext, ssl, sasl_ssl"),
        ({"listener.security.protocol": "SASL_SSL"}, "listener.security.protocol=sasl_ssl needs it: name the PEM file"),
        (
            {"listener.security.protocol": "sasl_ssl", **KEYSTORE, "ssl.client.auth": "required"},
            "ssl.truststore.location is not set, and ssl.client.auth=required",
        ),
        (
            {"listener.security.protocol": "sasl_ssl", **KEYSTORE, "controller.quorum.voters": "1@127.0.0.1:9093"},
            "ssl.truststore.location is not set, and nodes have to show certificates to each other",
        ),
        ({"sasl.enabled.mechanisms": "PLAIN"}, "expected a list of SCRAM-SHA-256, SCRAM-SHA-512"),
        ({"authorizer": "AclAuthorizer"}, "expected one of none, acl"),
        ({"super.users": "alice"}, "'alice' is no principal; write User:NAME, with semicolons between"),
        ({"super.users": "User:alice;bob"}, "'bob' is no principal"),
        ({"super.users": "User:"}, "'User:' is no principal"),
        ({"super.users": "User:alice,User:bob"}, "has a comma"),
        ({"super.users": "User:*"}, "would let everybody do everything"),
        ({"super.users": "User:ANONYMOUS"}, "would let everybody do everything"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        config(values)


def test_a_node_alone_that_asks_for_no_certificates_needs_no_ca() -> None:
    made = config({"listener.security.protocol": "ssl", **KEYSTORE, "ssl.client.auth": "none"})
    assert made.ssl_truststore_location == ""


def test_users_with_passwords_show_no_certificates_unless_they_are_asked() -> None:
    made = config({"listener.security.protocol": "Sasl_SSL", **KEYSTORE})
    assert not made.asks_for_certificates
    assert made.security_inter_broker_protocol == "ssl"
    assert made.sasl_enabled_mechanisms == ("SCRAM-SHA-256", "SCRAM-SHA-512")
    assert made.client_settings() == {"security.protocol": "sasl_ssl"}
    asks = config({**SSL, "listener.security.protocol": "sasl_ssl", "ssl.client.auth": "required"})
    assert asks.asks_for_certificates
    assert asks.client_settings()["ssl.certificate.location"] == "node.pem"
    assert not config({**SSL, "ssl.client.auth": "none"}).asks_for_certificates


def test_with_passwords_listeners_may_be_reached_from_elsewhere() -> None:
    assert not config({**EVERYWHERE, **SSL, "listener.security.protocol": "sasl_ssl"}).insecure
    with pytest.raises(InvalidConfig, match="plaintext is still taken"):
        config({**EVERYWHERE, **SSL, "listener.security.protocol": "sasl_ssl", "listener.security.migration": True})


def test_a_client_on_this_machine_is_an_administrator(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text('bob = "one"\nroot = "two"\n')
    keys = {"listener.security.protocol": "sasl_ssl", **CERTIFICATES, "sasl.users.location": str(users)}
    made = config({**keys, "super.users": "User:root; User:carol"})
    assert made.client_settings() == {
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": "ca.pem",
        "sasl.username": "root",
        "sasl.password": "two",
        "sasl.mechanism": "SCRAM-SHA-512",
    }
    assert "two" not in repr(made)
    weaker = config({**keys, "super.users": "User:root", "sasl.enabled.mechanisms": "SCRAM-SHA-256"})
    assert weaker.client_settings()["sasl.mechanism"] == "SCRAM-SHA-256"
    users.write_text("root")
    with pytest.raises(InvalidConfig, match=r"sasl\.users\.location=.*: it is no TOML"):
        made.client_settings()


def test_super_users_are_separated_by_semicolons() -> None:
    assert super_users("User:a;User:b c; User:CN=d ;") == {"User:a", "User:b c", "User:CN=d"}
    assert super_users("") == frozenset()


def test_variables_of_clients_are_not_taken_for_the_servers() -> None:
    variables = {
        "RAFTLOG_CLIENT_CONFIG": "client.toml",
        "RAFTLOG_SECURITY_PROTOCOL": "ssl",
        "RAFTLOG_SSL_CA_LOCATION": "ca.pem",
        "RAFTLOG_SSL_CERTIFICATE_LOCATION": "client.pem",
        "RAFTLOG_SSL_KEY_LOCATION": "client.key",
    }
    made = BrokerConfig.load(environment={"RAFTLOG_NODE_ID": "1", "RAFTLOG_LOG_DIRS": "/data", **variables})
    assert made.listener_security_protocol == "plaintext"
