"""Checks of brokers' settings for users and permissions, and of the permissions of the doctor's own user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from shlex import quote
from typing import Final

from raftlog._core.descriptions import NodeDescription
from raftlog._core.words import counted
from raftlog._doctor.picture import Picture, Problem, ids, setting
from raftlog._doctor.report import Check

NOT_ALL_SEEN: Final = "not-all-seen"
_WHO: Final = re.compile(r"(User:.+?) may not [A-Z]")
_LOOKS: Final = "--operation Describe --operation DescribeConfigs"


def restricted(picture: Picture) -> Iterator[Problem]:
    """Find the parts of the cluster that this user has no permission to see."""
    refusals = [
        each for each in picture.refusals() if each.part != "hanging"
    ]  # it only skips the check of hanging transactions
    unread = sorted(node_id for node_id, node in (picture.nodes or {}).items() if not node.configs)
    hidden = picture.hidden_topics
    if not (refusals or hidden or unread):
        return
    what = {"configs": "settings of ", "replicas": "the progress of replicas, at "}
    parted = [each for each in refusals if each.who not in ("all", "some")]
    where = [f"{'some of the ' if each.who == 'some' else ''}{each.part}" for each in refusals if each not in parted]
    where += [f"settings of nodes {ids(unread)}"] if unread else []
    where += [f"topic {name}" for name in hidden]
    where += [f"{what.get(each.part, '')}{each.who}" for each in parted]
    parts = {each.part for each in refusals}
    if parts & {"quorum", "nodes"}:  # unknown: lists leave out what this user may not see
        where.append("topics, groups and transactions that lists may leave out")
        parts |= {"topics", "groups", "transactions"}
    about = []
    if unread or parts & {"quorum", "nodes", "replicas"}:
        about.append(f"{_LOOKS} --cluster")
    if hidden or parts & {"topics", "configs"} or any("topic" in each.why for each in refusals):
        about.append(f"{_LOOKS} --topic '*'")
    if parts & {"groups", "lags"}:
        about.append("--operation Describe --group '*'")
    if "transactions" in parts:
        about.append("--operation Describe --transactional-id '*'")
    who = next((found[1] for each in refusals if (found := _WHO.search(each.why))), "User:NAME")
    among = f", including {counted(len(hidden), 'topic')}" if hidden else ""
    yield Problem(
        "warning",
        f"this user may not see everything{among}; problems there are not found",
        tuple(dict.fromkeys(where)),
        "; ".join(f"raftlog acl add --allow-principal {quote(who)} {each}" for each in about),
    )


PERMITTED_CHECKS = (Check(NOT_ALL_SEEN, "what this user may not see", (), restricted),)


PLAINTEXT: Final = "plaintext"


def _authorizes(node: NodeDescription) -> bool:
    """Return whether a broker has an authorizer; one of an older version has none."""
    return setting(node, "authorizer") not in ("", "none")


def without_super_users(picture: Picture) -> Iterator[Problem]:
    """Find brokers with an authorizer but no super user."""
    found = [
        node_id
        for node_id, node in sorted(picture.broker_nodes().items())
        if _authorizes(node) and not setting(node, "super.users")
    ]
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'broker has', 'brokers have')} an authorizer but no super user: if no user may "
            "change permissions any more, only a node's certificate can restore that",
            tuple(f"broker {node_id}" for node_id in found),
            "set super.users in their configuration, for example User:admin, and restart them one by one",
        )


def anonymous(picture: Picture) -> Iterator[Problem]:
    """Find brokers with an authorizer where clients are anonymous."""
    found = []
    for node_id, node in sorted(picture.broker_nodes().items()):
        protocol = setting(node, "listener.security.protocol") or PLAINTEXT
        if not _authorizes(node):
            continue
        if protocol == PLAINTEXT:
            found.append(f"broker {node_id}: listener.security.protocol=plaintext")
        elif protocol == "ssl" and setting(node, "ssl.client.auth") == "none":
            found.append(f"broker {node_id}: ssl.client.auth=none")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'broker has', 'brokers have')} an authorizer, but all clients are User:ANONYMOUS: "
            "permissions of other users have no effect",
            tuple(found),
            "set listener.security.protocol=sasl_ssl, or ssl with client certificates (docs/security.md)",
        )


def open_to_everybody(picture: Picture) -> Iterator[Problem]:
    """Find brokers with an authorizer that let every user do everything with resources without ACLs."""
    found = [
        node_id
        for node_id, node in sorted(picture.broker_nodes().items())
        if _authorizes(node) and setting(node, "allow.everyone.if.no.acl.found") == "true"
    ]
    if found:
        yield Problem(
            "warning",
            f"on {counted(len(found), 'broker')} all users may do everything with resources without permissions: "
            "allow.everyone.if.no.acl.found=true, which is only for the introduction of permissions",
            tuple(f"broker {node_id}" for node_id in found),
            "once raftlog acl list has all permissions that users need: remove allow.everyone.if.no.acl.found from "
            "their configuration, and restart them one by one",
        )


def unrestricted(picture: Picture) -> Iterator[Problem]:
    """Find brokers where users log in but may do everything."""
    found = [
        node_id
        for node_id, node in sorted(picture.broker_nodes().items())
        if setting(node, "listener.security.protocol") == "sasl_ssl" and not _authorizes(node)
    ]
    if found:
        yield Problem(
            "note",
            f"on {counted(len(found), 'broker')} every user may read, write and delete everything: they have no "
            "authorizer",
            tuple(f"broker {node_id}" for node_id in found),
            "set authorizer=acl and super.users, in the order of docs/security.md",
        )


PERMISSIONS_CHECKS = (
    Check("authorizer-no-super-user", "permissions without a super user", ("nodes",), without_super_users),
    Check("authorizer-anonymous", "permissions while all clients are anonymous", ("nodes",), anonymous),
    Check("authorizer-open", "resources without permissions that are open to all users", ("nodes",), open_to_everybody),
    Check("users-unrestricted", "users that may all do everything", ("nodes",), unrestricted),
)
