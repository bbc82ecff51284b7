"""Checks of the server's configuration: of each value, and of all values together (`check_values`, `warnings_of`).

A check of one value returns a complaint, or None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from broker.config.endpoints import (
    KAFKA,
    KAFKA_PROTOCOLS,
    PLAINTEXT,
    SASL_PLAINTEXT,
    SASL_SSL,
    SSL,
    by_protocol,
    kafka_protocol,
    parse_endpoint,
    parse_voters,
)
from broker.security import mapping
from raftlog._core.cluster import is_loopback
from raftlog._core.security.acls import ANONYMOUS, EVERYBODY, USER_PREFIX, super_users_of
from raftlog.config import Value
from raftlog.errors import InvalidConfig

ASSIGNORS: Final = ("sticky", "range", "roundrobin")

"""The assignors that need no entry point."""

_ASSIGNOR_NAME = re.compile(r"[a-zA-Z0-9._-]{1,100}", re.ASCII)


def _is_limit(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def connection_overrides(value: Value) -> str | None:
    assert isinstance(value, tuple)
    for each in value:
        host, _, limit = each.rpartition(":")
        try:
            ip_address(host.strip("[]"))
        except ValueError:
            return f"{each[:60]!r} is not ADDRESS:NUMBER, such as 10.0.0.1:500"
        if not _is_limit(limit):
            return f"{each[:60]!r} does not end in a number of connections"
    return None


def assignors(value: Value) -> str | None:
    assert isinstance(value, tuple)
    if not value:
        return f"name at least one assignor, such as {', '.join(ASSIGNORS)}"
    if len(set(value)) < len(value):
        return "names an assignor twice"
    wrong = [name for name in value if _ASSIGNOR_NAME.fullmatch(name) is None]
    return f"{wrong[0][:40]!r} is no name of an assignor" if wrong else None


WITH_TLS: Final = (SSL, SASL_SSL)
WITH_SASL: Final = (SASL_PLAINTEXT, SASL_SSL)

ACL: Final = "acl"

SCRAM_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512")
PLAIN: Final = "PLAIN"

OAUTHBEARER: Final = "OAUTHBEARER"
OAUTH_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384")
"""The allowed algorithms. With a symmetric one, everyone who can check a token could make one."""

SAME: Final = "same"

"""Of security.inter.broker.protocol: what listener.security.protocol says."""


def mapping_rules(value: Value) -> str | None:
    try:
        mapping.parse(str(value))
    except ValueError as error:
        return str(error)
    return None


def principals(value: Value) -> str | None:
    assert isinstance(value, str)
    for principal in sorted(super_users_of(value)):
        name = principal.removeprefix(USER_PREFIX)
        if name == principal or not name:
            return f"{principal!r} is not a principal; write User:NAME, with semicolons between: User:alice;User:bob"
        if f",{USER_PREFIX}" in name:
            return f"{principal!r} has a comma; write semicolons between principals: User:alice;User:bob"
        if principal in (EVERYBODY, ANONYMOUS):
            return f"{principal} would give all clients all rights; leave `authorizer` at none if that is meant"
    return None


def limits_of_users(text: str) -> dict[str, int]:
    """Return the limit of each principal in `User:NAME:LIMIT;User:NAME:LIMIT`. A name may have colons and commas.

    Raises:
        ValueError: some part is not of this form.
    """
    limits = {}
    for each in filter(None, map(str.strip, text.split(";"))):
        principal, _, limit = each.rpartition(":")
        if not principal.startswith(USER_PREFIX) or principal == USER_PREFIX:
            raise ValueError(f"{each[:60]!r} is not User:NAME:LIMIT, such as User:alice:50000")
        if not _is_limit(limit):
            raise ValueError(f"{each[:60]!r} does not end in a limit, such as User:alice:50000")
        if principal in limits:
            raise ValueError(f"{principal[:60]!r} has two limits")
        limits[principal] = int(limit)
    return limits


def user_overrides(value: Value) -> str | None:
    try:
        limits_of_users(str(value))
    except ValueError as error:
        return str(error)
    return None


EXPORTERS: Final = ("none", "otlp", "console")


def collector(value: Value) -> str | None:
    if not value:
        return None
    try:
        parts = urlsplit(str(value))
        if parts.scheme in ("http", "https") and parts.hostname and parts.port:
            return None
    except ValueError:
        pass
    return "expected http://host:port, or https://host:port for TLS, of a collector that takes OTLP over gRPC"


def some_role(value: Value) -> str | None:
    return None if value else "name at least one role: broker, controller, or both"


def no_auto_create(value: Value) -> str | None:
    return "brokers never create topics by themselves; create them with the admin API" if value else None


REQUEST_OVERHEAD_BYTES: Final = 64 << 10
"""The bytes of a request around its largest batch."""
LONGEST_LEASE: Final = 0.9
"""The longest lease, as a share of the session timeout; the rest allows for clocks of different speed."""
ANY_ADDRESS: Final = ("0.0.0.0", "::")


def inter_node_protocol(values: Mapping[str, Any]) -> str:
    """Return the protocol between this node and others: `plaintext` or `ssl`."""
    protocol = values["security.inter.broker.protocol"]
    if protocol == SAME:
        protocol = SSL if values["listener.security.protocol"] in WITH_TLS else PLAINTEXT
    return str(protocol)


def asks_for_certificates(values: Mapping[str, Any], protocol: str) -> bool:
    """Whether clients of a listener with that security protocol must show certificates."""
    asked = values["ssl.client.auth"]
    return bool(asked == "required" or (asked == "auto" and protocol not in WITH_SASL))


def check_values(values: Mapping[str, Any]) -> None:
    """Check rules that concern several keys.

    Raises:
        InvalidConfig: values contradict each other; the message names them, and says what to do.
    """
    if values["node.id"] is None:
        raise InvalidConfig("node.id is not set; give this node a number of its own, for example node.id = 1")
    log_dirs = values["log.dirs"]
    if not log_dirs and "broker" not in values["process.roles"] and not values["metadata.log.dir"]:
        raise InvalidConfig(
            "neither metadata.log.dir nor log.dirs is set; name a directory for the metadata, for example "
            'metadata.log.dir = "/var/lib/raftlog"'
        )
    if not log_dirs and "broker" in values["process.roles"]:
        raise InvalidConfig('log.dirs is not set; name a directory for the data, for example "/var/lib/raftlog"')
    if len(set(map(_normalized, log_dirs))) < len(log_dirs):
        raise InvalidConfig(f"log.dirs={','.join(log_dirs)} names a directory twice")
    if _normalized(values["metadata.log.dir"]) in map(_normalized, log_dirs) and values["metadata.log.dir"]:
        raise InvalidConfig(
            f"metadata.log.dir={values['metadata.log.dir']!r} is one of log.dirs; give it a directory of its own"
        )
    _check_listeners(values)
    _check_quorum(values)
    _check_security(values)
    _check_times(values)
    needed = values["message.max.bytes"] + REQUEST_OVERHEAD_BYTES
    if values["socket.request.max.bytes"] < needed:
        raise InvalidConfig(
            f"socket.request.max.bytes={values['socket.request.max.bytes']} leaves no room for a batch of "
            f"message.max.bytes={values['message.max.bytes']}; set it to {needed} or more"
        )
    heartbeat_ms, session_ms = (values[f"group.consumer.{key}.ms"] for key in ("heartbeat.interval", "session.timeout"))
    if 2 * heartbeat_ms >= session_ms:
        raise InvalidConfig(
            f"group.consumer.session.timeout.ms={session_ms} ends when one heartbeat is late: set it above "
            f"{2 * heartbeat_ms}, two of group.consumer.heartbeat.interval.ms={heartbeat_ms}"
        )
    if values["num.partitions"] > values["max.partitions.per.topic"]:
        raise InvalidConfig(
            f"num.partitions={values['num.partitions']} is above "
            f"max.partitions.per.topic={values['max.partitions.per.topic']}"
        )


def warnings_of(values: Mapping[str, Any]) -> list[str]:
    """Return a warning for each setting that is valid but probably a mistake; a node logs them at its start. Pure."""
    found = []
    smallest = values["min.segment.bytes"]
    if values["log.segment.bytes"] < smallest:
        found.append(
            f"log.segment.bytes={values['log.segment.bytes']} is below min.segment.bytes={smallest}, which is used "
            "instead: raise log.segment.bytes, or lower min.segment.bytes"
        )
    if values["min.insync.replicas"] > values["default.replication.factor"]:
        found.append(
            f"min.insync.replicas={values['min.insync.replicas']} is above "
            f"default.replication.factor={values['default.replication.factor']}: topics that are created without a "
            "replication factor refuse writes with acks=all; raise default.replication.factor"
        )
    if (
        values["ssl.keystore.location"]
        and values["listener.security.protocol"] == PLAINTEXT
        and inter_node_protocol(values) == PLAINTEXT
        and not values["listener.security.migration"]
        and "ssl" not in kafka_protocol(values["listeners"])
    ):
        found.append(
            f"ssl.keystore.location={values['ssl.keystore.location']} is not used: listener.security.protocol is "
            "plaintext; set it to ssl or sasl_ssl if clients should use TLS"
        )
    return found


def _normalized(path: str) -> str:
    return str(Path(path).absolute())


def _check_listeners(values: Mapping[str, Any]) -> None:
    listeners, advertised = by_protocol(values["listeners"]), by_protocol(values["advertised.listeners"])
    for_kafka = kafka_protocol(values["listeners"])
    named = f"listeners={','.join(values['listeners'])!r}"
    for clients, (host, port) in listeners.items():
        if clients == KAFKA:
            _check_kafka(values, host, named)
        else:
            _check_reachable(values, host, values["listener.security.protocol"], named)
        if host in ANY_ADDRESS and clients not in advertised:
            told = f", as {for_kafka}://host:port" if clients == KAFKA else ""
            raise InvalidConfig(
                f"{named}: {host}:{port} means every address of this machine, so clients cannot connect to it; "
                f"set advertised.listeners to an address that they can reach{told}"
            )
    named = f"advertised.listeners={','.join(values['advertised.listeners'])!r}"
    for clients, (host, _) in advertised.items():
        if host in ANY_ADDRESS:
            raise InvalidConfig(f"{named}: clients cannot connect to that address")
        if clients not in listeners:
            raise InvalidConfig(f"{named}: `listeners` has no address for {clients} clients; name one there as well")
    told = kafka_protocol(values["advertised.listeners"])
    if told and told != for_kafka:
        raise InvalidConfig(f"{named}: `listeners` has {for_kafka}://, so write {for_kafka}:// here as well")


def _check_kafka(values: Mapping[str, Any], host: str, named: str) -> None:
    """Refuse a plaintext listener for Kafka clients that would bypass the security of the other listener."""
    name = kafka_protocol(values["listeners"])
    protocol = KAFKA_PROTOCOLS[name]
    if protocol in WITH_TLS or values["insecure"]:
        return
    if not is_loopback(host):
        what = "passwords in plaintext are" if protocol == SASL_PLAINTEXT else "plaintext without authentication is"
        raise InvalidConfig(
            f"{named}: {what} for loopback addresses only; write kafka+sasl+ssl:// or kafka+ssl:// for TLS, listen on "
            "127.0.0.1, or start with --insecure (insecure = true) if anyone who reaches the port may do everything"
        )
    if protocol == PLAINTEXT and values["listener.security.protocol"] != PLAINTEXT:
        raise InvalidConfig(
            f"{named}: {name}:// admits anyone, but listener.security.protocol="
            f"{values['listener.security.protocol']} does not; write kafka+sasl+ssl:// or kafka+ssl://, or start with "
            "--insecure (insecure = true) if anyone on this machine may do everything"
        )


def _check_reachable(values: Mapping[str, Any], host: str, protocol: str, key: str) -> None:
    """Refuse plaintext on an address that other machines can reach, unless the configuration allows it explicitly."""
    takes_plaintext = protocol == PLAINTEXT or values["listener.security.migration"]
    if not takes_plaintext or is_loopback(host) or values["insecure"]:
        return
    if protocol == PLAINTEXT:
        raise InvalidConfig(
            f"{key}: plaintext without authentication is for loopback addresses only; listen on 127.0.0.1, turn TLS on "
            "(listener.security.protocol = ssl), or start with --insecure (insecure = true) if anyone who reaches the "
            "port may do everything"
        )
    raise InvalidConfig(
        f"{key}: listener.security.migration=true still accepts plaintext; set it to false, or start with --insecure "
        "(insecure = true) if until then anyone who reaches the port may do everything"
    )


def _check_security(values: Mapping[str, Any]) -> None:
    """Check that every listener with TLS has certificates. The server's start checks whether they are valid."""
    roles, migration = values["process.roles"], values["listener.security.migration"]
    _check_mechanisms(values)
    protocol = values["listener.security.protocol"]
    for_kafka = KAFKA_PROTOCOLS.get(kafka_protocol(values["listeners"]), PLAINTEXT)
    with_tls = [each for each in (protocol, for_kafka) if each in WITH_TLS]
    for_clients = "broker" in roles and (bool(with_tls) or migration)
    for_nodes = bool(values["controller.quorum.voters"]) and (inter_node_protocol(values) == SSL or migration)
    _check_oauth(values)
    if not for_clients and not for_nodes:
        return
    if migration:
        why = "listener.security.migration=true"
    elif for_clients:
        of_kafka = f"{kafka_protocol(values['listeners'])}:// in `listeners`"
        why = f"listener.security.protocol={protocol}" if protocol in WITH_TLS else of_kafka
    else:
        why = "ssl between nodes (security.inter.broker.protocol)"
    if not values["ssl.keystore.location"]:
        raise InvalidConfig(
            f"ssl.keystore.location is not set, and {why} needs it: name the PEM file with this node's certificate "
            "and key"
        )
    if not values["ssl.truststore.location"] and (for_nodes or _any_asks(values, with_tls, migration)):
        asks = "nodes must show certificates to each other" if for_nodes else "ssl.client.auth=required"
        instead = "" if for_nodes else ", or set ssl.client.auth = none if anyone at the port may do everything"
        raise InvalidConfig(
            f"ssl.truststore.location is not set, and {asks}: name the PEM file with the certificate of the CA that "
            f"has issued them{instead}"
        )


def _any_asks(values: Mapping[str, Any], with_tls: Sequence[str], migration: bool) -> bool:
    """Whether a listener for clients asks for certificates."""
    protocols = [*with_tls, *([values["listener.security.protocol"]] if migration else [])]
    return any(asks_for_certificates(values, each) for each in protocols)


def _check_mechanisms(values: Mapping[str, Any]) -> None:
    mechanisms = values["sasl.enabled.mechanisms"]
    if PLAIN in mechanisms and not set(mechanisms).intersection(SCRAM_MECHANISMS):
        raise InvalidConfig(
            "sasl.enabled.mechanisms=PLAIN alone: PLAIN checks passwords against the users' SCRAM credentials, and is "
            f"for Kafka clients only; add {SCRAM_MECHANISMS[-1]}"
        )


def _check_oauth(values: Mapping[str, Any]) -> None:
    """Refuse OAUTHBEARER without the keys that define which tokens are for this cluster."""
    if OAUTHBEARER not in values["sasl.enabled.mechanisms"]:
        return
    plaintext = KAFKA_PROTOCOLS.get(kafka_protocol(values["listeners"])) == SASL_PLAINTEXT
    if plaintext and not set(values["sasl.enabled.mechanisms"]).intersection(SCRAM_MECHANISMS):
        raise InvalidConfig(
            "sasl.enabled.mechanisms=OAUTHBEARER alone: at kafka+sasl:// a token would be sent in plaintext, so it is "
            f"not taken there; write kafka+sasl+ssl://, or add {SCRAM_MECHANISMS[-1]}"
        )
    for name, why in (
        ("jwks.endpoint.url", "the keys of the tokens' issuer: https://HOST/PATH, or file:///PATH"),
        ("expected.issuer", "the issuer, as the claim iss of its tokens has it"),
        ("expected.audience", "the claim aud of tokens for this cluster"),
    ):
        if not values[f"sasl.oauthbearer.{name}"]:
            raise InvalidConfig(
                f"sasl.enabled.mechanisms has OAUTHBEARER, so sasl.oauthbearer.{name} has to be set: {why}"
            )


def _check_quorum(values: Mapping[str, Any]) -> None:
    node_id, roles = values["node.id"], values["process.roles"]
    voters = parse_voters(values["controller.quorum.voters"])
    named = ",".join(values["controller.quorum.voters"])
    if not voters:
        if set(roles) != {"broker", "controller"}:
            raise InvalidConfig(
                f"process.roles={','.join(roles)} without controller.quorum.voters: a node that is alone is both "
                "broker and controller; name the controllers as id@host:port, or leave process.roles out"
            )
        for key in ("inter.node.listener", "advertised.inter.node.listener", "inter.node.routes"):
            if values[key]:
                shown = values[key] if isinstance(values[key], str) else ",".join(values[key])
                raise InvalidConfig(
                    f"{key}={shown!r} without controller.quorum.voters: a node that is alone calls no other; name "
                    "the controllers as id@host:port"
                )
        return
    if "controller" in roles and node_id not in voters:
        raise InvalidConfig(
            f"this node is a controller, but node.id={node_id} is not in controller.quorum.voters={named}; "
            "correct one of them, or set process.roles = broker"
        )
    if "controller" not in roles and node_id in voters:
        raise InvalidConfig(
            f"node.id={node_id} is in controller.quorum.voters={named}, but process.roles={','.join(roles)} has no "
            "controller; add that role, or give this broker a number of its own"
        )
    if len(voters) > 1 and not values["cluster.id"]:
        raise InvalidConfig(
            "cluster.id is not set; with several controllers every node needs the same one. For a new cluster make one "
            "with `raftlog quorum new-id`; a node that has run before has one: "
            "`raftlog quorum describe --config FILE` shows it"
        )
    if "controller" not in roles and not values["inter.node.listener"]:
        raise InvalidConfig(
            "inter.node.listener is not set; a broker that is not a controller needs one, at which its followers fetch "
            'from it, for example inter.node.listener = "127.0.0.1:9093"'
        )
    _check_inter_node_listener(values, voters.get(node_id))


def _check_inter_node_listener(values: Mapping[str, Any], voter: tuple[str, int] | None) -> None:
    own = values["inter.node.listener"]
    endpoint = parse_endpoint(own) if own else voter
    assert endpoint is not None, "a node that is not a voter names its listener"
    host, port = endpoint
    key = f"inter.node.listener={own!r}" if own else f"controller.quorum.voters: this node is at {host}:{port}"
    if port == 0:
        raise InvalidConfig(f"{key}: the other nodes need to know the port; name one")
    _check_reachable(values, host, inter_node_protocol(values), key)
    if not own and host in ANY_ADDRESS:
        raise InvalidConfig(f"{key}, to which other nodes cannot connect; name an address that they can reach")
    if voter is None and host in ANY_ADDRESS and not values["advertised.inter.node.listener"]:
        raise InvalidConfig(
            f"{key} means every address of this machine, so other nodes cannot connect to it; set "
            "advertised.inter.node.listener to an address that they can reach"
        )
    advertised = values["advertised.inter.node.listener"]
    if advertised and parse_endpoint(advertised)[0] in ANY_ADDRESS:
        raise InvalidConfig(f"advertised.inter.node.listener={advertised!r}: no node can connect to that address")


def _check_times(values: Mapping[str, Any]) -> None:
    heartbeat_ms, lease_ms = values["broker.heartbeat.interval.ms"], values["broker.lease.ms"]
    session_ms = values["broker.session.timeout.ms"]
    if lease_ms > LONGEST_LEASE * session_ms:
        raise InvalidConfig(
            f"broker.lease.ms={lease_ms} has to end before others may lead: set it to at most "
            f"{int(LONGEST_LEASE * session_ms)}, nine tenths of broker.session.timeout.ms={session_ms}"
        )
    if lease_ms <= 2 * heartbeat_ms:
        raise InvalidConfig(
            f"broker.lease.ms={lease_ms} ends when one heartbeat is late: set it above {2 * heartbeat_ms}, two of "
            f"broker.heartbeat.interval.ms={heartbeat_ms}, or send heartbeats more often"
        )
