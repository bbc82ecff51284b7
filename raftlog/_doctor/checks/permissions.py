"""Users and permissions, as far as settings tell: whom nobody can name, and whom nobody holds back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture
from raftlog._doctor.report import Check
from raftlog._node_descriptions import NodeDescription

PLAINTEXT: Final = "plaintext"


def _value(node: NodeDescription, key: str) -> str:
    found = node.configs.get(key)
    return found.value if found is not None else ""


def _authorizes(node: NodeDescription) -> bool:
    """Whether a broker goes by permissions. One of a version without them does not."""
    return _value(node, "authorizer") not in ("", "none")


def without_super_users(picture: Picture) -> Iterator[Finding]:
    """Find brokers with permissions where no user may do everything."""
    found = [
        node_id
        for node_id, node in sorted(picture.broker_nodes().items())
        if _authorizes(node) and not _value(node, "super.users")
    ]
    if found:
        yield Finding(
            "authorizer-no-super-user",
            "warning",
            f"{counted(len(found), 'broker goes', 'brokers go')} by permissions without any super user: when nobody is "
            "left who may change permissions, only a node's certificate gets that back",
            tuple(f"broker {node_id}" for node_id in found),
            "set super.users in their configuration, for example User:admin, and start them again one after the other",
        )


def anonymous(picture: Picture) -> Iterator[Finding]:
    """Find brokers with permissions where clients cannot say who they are."""
    found = []
    for node_id, node in sorted(picture.broker_nodes().items()):
        protocol = _value(node, "listener.security.protocol") or PLAINTEXT
        if not _authorizes(node):
            continue
        if protocol == PLAINTEXT:
            found.append(f"broker {node_id}: listener.security.protocol=plaintext")
        elif protocol == "ssl" and _value(node, "ssl.client.auth") == "none":
            found.append(f"broker {node_id}: ssl.client.auth=none")
    if found:
        yield Finding(
            "authorizer-anonymous",
            "warning",
            f"{counted(len(found), 'broker goes', 'brokers go')} by permissions where everybody is User:ANONYMOUS: "
            "what other users may do counts for nobody",
            tuple(found),
            "set listener.security.protocol=sasl_ssl, or ssl with certificates of clients (docs/security.md)",
        )


def open_to_everybody(picture: Picture) -> Iterator[Finding]:
    """Find brokers that go by permissions, and let everybody do what no permission is about."""
    found = [
        node_id
        for node_id, node in sorted(picture.broker_nodes().items())
        if _authorizes(node) and _value(node, "allow.everyone.if.no.acl.found") == "true"
    ]
    if found:
        yield Finding(
            "authorizer-open",
            "warning",
            f"on {counted(len(found), 'broker')} everybody may do everything with what no permission is about: "
            "allow.everyone.if.no.acl.found=true, which is for turning permissions on",
            tuple(f"broker {node_id}" for node_id in found),
            "once raftlog acl list has what everybody needs: take allow.everyone.if.no.acl.found out of their "
            "configuration, and start them again one after the other",
        )


def unrestricted(picture: Picture) -> Iterator[Finding]:
    """Find brokers where users log in, and may do everything."""
    found = [
        node_id
        for node_id, node in sorted(picture.broker_nodes().items())
        if _value(node, "listener.security.protocol") == "sasl_ssl" and not _authorizes(node)
    ]
    if found:
        yield Finding(
            "users-unrestricted",
            "note",
            f"on {counted(len(found), 'broker')} every user may read, write and delete everything: permissions do not "
            "count there",
            tuple(f"broker {node_id}" for node_id in found),
            "set authorizer=acl and super.users; docs/security.md says in which order",
        )


CHECKS = (
    Check("authorizer-no-super-user", "permissions without a super user", ("nodes",), without_super_users),
    Check("authorizer-anonymous", "permissions where nobody can say who they are", ("nodes",), anonymous),
    Check("authorizer-open", "permissions that let everybody do what none is about", ("nodes",), open_to_everybody),
    Check("users-unrestricted", "users who may all do everything", ("nodes",), unrestricted),
)
