"""The server's keys for TLS, users and permissions; docs/security.md says how they are used."""

from __future__ import annotations

from typing import Final

from raftlog.config import ConfigKey, Value
from raftmeta.acls import ANONYMOUS, EVERYBODY, USER_PREFIX

PLAINTEXT: Final = "plaintext"
SSL: Final = "ssl"
SASL_SSL: Final = "sasl_ssl"
WITH_TLS: Final = (SSL, SASL_SSL)
ACL: Final = "acl"
SCRAM_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512")
SAME: Final = "same"
"""Of security.inter.broker.protocol: what listener.security.protocol says."""


def super_users(text: str) -> frozenset[str]:
    """Return the principals of `super.users`: `User:a;User:b`."""
    return frozenset(filter(None, (each.strip() for each in text.split(";"))))


def _complaint_of_super_users(value: Value) -> str | None:
    assert isinstance(value, str)
    for principal in sorted(super_users(value)):
        name = principal.removeprefix(USER_PREFIX)
        if name == principal or not name:
            return f"{principal!r} is no principal; write User:NAME, with semicolons between: User:alice;User:bob"
        if f",{USER_PREFIX}" in name:
            return f"{principal!r} has a comma; principals stand with semicolons between: User:alice;User:bob"
        if principal in (EVERYBODY, ANONYMOUS):
            return f"{principal} would let everybody do everything; leave `authorizer` at none if that is meant"
    return None


SECURITY_KEYS: Final = (
    ConfigKey(
        name="listener.security.protocol",
        kind="string",
        default=PLAINTEXT,
        choices=(PLAINTEXT, SSL, SASL_SSL),
        ignore_case=True,
        mirrors="listener.security.protocol.map",
        doc="What clients speak at `listeners`: plaintext, TLS (ssl), or TLS with a user's name and password "
        "(sasl_ssl, by SCRAM). With ssl the common name of a client's certificate is its user.",
    ),
    ConfigKey(
        name="security.inter.broker.protocol",
        kind="string",
        default=SAME,
        choices=(SAME, PLAINTEXT, SSL),
        ignore_case=True,
        doc="What nodes speak among each other; the same on all. With ssl both ends show a certificate, which has to "
        "name the node: a URI raftlog://node/ID among its subject alternative names, or several where nodes share "
        "one, or else the common name raftlog-node-ID. same: what listener.security.protocol says, ssl with sasl_ssl.",
    ),
    ConfigKey(
        name="listener.security.migration",
        kind="bool",
        default=False,
        own=True,
        doc="Take TLS and plaintext at both listeners, while TLS is turned on or off by rolling restarts. What this "
        "node itself speaks to others is what security.inter.broker.protocol says. With sasl_ssl who gives no password "
        "is User:ANONYMOUS meanwhile, with or without TLS, and clients' addresses are not known. Costs speed.",
    ),
    ConfigKey(
        name="ssl.keystore.location",
        kind="string",
        default="",
        doc="PEM file with this node's certificate, followed by those between it and the CA; and with the private key, "
        "unless ssl.keystore.key.location names another file. Needed for ssl. Read again when it changes.",
    ),
    ConfigKey(
        name="ssl.keystore.key.location",
        kind="string",
        default="",
        own=True,
        doc="PEM file with this node's private key, not encrypted. Read again when it changes.",
    ),
    ConfigKey(
        name="ssl.truststore.location",
        kind="string",
        default="",
        doc="PEM file with the certificates of the CAs that clients' and nodes' certificates are checked against. "
        "Needed for ssl between nodes and for ssl.client.auth=required. Read again when it changes.",
    ),
    ConfigKey(
        name="ssl.client.auth",
        kind="string",
        default="auto",
        choices=("auto", "none", "required"),
        ignore_case=True,
        doc="Whether a client has to show a certificate of a CA in ssl.truststore.location. auto: required with ssl, "
        "none with sasl_ssl. With ssl and none everybody is User:ANONYMOUS, and without an authorizer anyone who "
        "reaches the port can read, write and delete everything. Nodes always have to show one.",
    ),
    ConfigKey(
        name="sasl.enabled.mechanisms",
        kind="list",
        default=SCRAM_MECHANISMS,
        choices=SCRAM_MECHANISMS,
        doc="With which mechanisms clients may prove that they know a password.",
    ),
    ConfigKey(
        name="sasl.users.location",
        kind="string",
        default="",
        own=True,
        doc='TOML file with a line `name = "password"` for each user of this broker besides those in the metadata: for '
        "the first administrator. Or a directory with a file for each, named like the user, with the password in it. "
        "Counts for names that the metadata does not have. Read again when it changes.",
    ),
    ConfigKey(
        name="authorizer",
        kind="string",
        default="none",
        choices=("none", ACL),
        ignore_case=True,
        mirrors="authorizer.class.name",
        doc="Whether users need permissions: acl, those that `raftlog acl add` gives; none, all may do everything. The "
        "same on all brokers.",
    ),
    ConfigKey(
        name="super.users",
        kind="string",
        default="",
        check=_complaint_of_super_users,
        doc="Who may do everything, with semicolons between: `User:alice;User:bob`. Who shows a node's certificate may "
        "as well.",
    ),
    ConfigKey(
        name="allow.everyone.if.no.acl.found",
        kind="bool",
        default=False,
        doc="With an authorizer: everybody may do everything with what no permission is about.",
    ),
)
