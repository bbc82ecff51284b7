"""The clients' options: every key is declared here once, as an attribute. Kafka's names, where Kafka has the key.

Callers write keys with underscores as keyword arguments, or with dots in `config`.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from raftlog._client.security import KEY_PASSWORD, KEY_PASSWORD_COMMAND, PROTOCOL, PemFiles, Sasl, sasl_of
from raftlog._client.security import Names as PemNames
from raftlog._core.backoff import Backoff, Pauses
from raftlog._core.cluster import parse_bootstrap
from raftlog._core.staging import MAX_ID_CHARACTERS
from raftlog.config import (
    ConfigDef,
    Settings,
    Value,
    duration_ms,
    duration_ms_or_none,
    integer,
    integer_or_none,
    number,
    settings_of,
    size_bytes,
    switch,
    text,
)
from raftlog.errors import InvalidConfig
from raftlog.types import Codec
from raftlog.v1 import common_pb2, log_pb2

CODECS: Final = {codec.name.lower(): codec for codec in Codec}
ACKS: Final = {"all": log_pb2.ALL, "-1": log_pb2.ALL, "1": log_pb2.LEADER, "0": log_pb2.NO_ACK}
ISOLATION: Final = {
    "read_committed": common_pb2.READ_COMMITTED,
    "read_uncommitted": common_pb2.READ_UNCOMMITTED,
}
_MAX_INT32: Final = (1 << 31) - 1

_SERVERS: Final = "the servers set it for the group"
_KAFKAS: Final = {
    "session.timeout.ms": f"{_SERVERS}, by group.consumer.session.timeout.ms in their configuration; a consumer has "
    "max.poll.interval.ms",
    "heartbeat.interval.ms": f"{_SERVERS}, by group.consumer.heartbeat.interval.ms in their configuration",
    "partition.assignment.strategy": "the coordinator distributes partitions: group.remote.assignor=sticky, range, "
    "roundrobin, or another one of the servers",
    "group.protocol": "there is only the protocol of KIP-848 (consumer)",
    "group.protocol.type": "there is only the protocol of KIP-848 (consumer)",
    "group.remote.assignors": "group.remote.assignor takes one name",
    "bootstrap.servers": "the addresses are an argument of their own, as host:port,host:port",
    "key.deserializer": "it is a function, and an argument of a consumer: key_deserializer=...",
    "value.deserializer": "it is a function, and an argument of a consumer: value_deserializer=...",
    "key.serializer": "it is a function, and an argument of a producer: key_serializer=...",
    "value.serializer": "it is a function, and an argument of a producer: value_serializer=...",
    "auto.commit.enable": "it is called enable.auto.commit",
    "compression.codec": "it is called compression.type",
    "message.timeout.ms": "it is called delivery.timeout.ms",
    "queue.buffering.max.ms": "it is called linger.ms",
    "queue.buffering.max.kbytes": "it is called buffer.memory, and counts bytes",
    "queue.buffering.max.messages": "buffer.memory limits the bytes that wait",
    "request.required.acks": "it is called acks",
    "enable.auto.offset.store": "a poll finishes the records of the previous one; commit(record) commits one by one",
    "enable.partition.eof": "Consumer.read_to_end reads up to the ends; end_offsets names them",
    "statistics.interval.ms": "metrics() returns them at any time",
    "fetch.min.bytes": "brokers send records as soon as they have them",
    "fetch.max.wait.ms": "brokers send records as soon as they have them; poll takes a timeout",
    "allow.auto.create.topics": "create topics with Admin.create_topic or raftlog topic create",
    "exclude.internal.topics": "patterns do not match internal topics; subscribe to one by name",
    "interceptor.classes": "clients have no interceptors",
}
"""Kafka's keys that do not exist here, and what to use instead."""


def refuse_kafkas(name: str) -> None:
    """Refuse a key of Kafka's clients that does not exist here; the message says what to use instead.

    Raises:
        InvalidConfig: it is such a key.
    """
    instead = _KAFKAS.get(name.lower().replace("_", "."))
    if instead is not None:
        raise InvalidConfig(f"{name} is not an option here, leave it out: {instead}")


_TYPING_ERROR: Final = 0.85
"""The similarity above which an unknown name counts as a misspelling of a known one."""
_SECURITY: Final = ("security.", "sasl.", "ssl.")
_PEM: Final = PemNames("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
_INSTEAD: Final = {
    "ssl.truststore.location": "ssl.ca.location names a PEM file with the CAs' certificates",
    "ssl.truststore.certificates": "ssl.ca.location names a PEM file with the CAs' certificates",
    "ssl.keystore.location": "ssl.certificate.location and ssl.key.location name PEM files",
    "ssl.keystore.certificate.chain": "ssl.certificate.location names a PEM file",
    "ssl.keystore.key": "ssl.key.location names a PEM file",
    "ssl.key.password": "ssl.key.password.location names a file with the password of an encrypted key",
    "ssl.keystore.password": "ssl.key.password.location names a file with the password of an encrypted key",
    "sasl.jaas.config": "sasl.username and sasl.password.location are the login",
    "sasl.mechanisms": "sasl.mechanism takes one mechanism",
    "ssl.endpoint.identification.algorithm": "the name of a broker is always checked against its certificate",
}


C = TypeVar("C", "ProducerOptions", "ConsumerOptions", "AdminOptions")


def refuse_security(name: str) -> None:
    """Refuse a key of Kafka for encryption or authentication that does not exist here; the message says what to use.

    Raises:
        InvalidConfig: it is such a key.
    """
    key = name.lower().replace("_", ".")
    known = [each.name for each in SECURITY_KEYS]
    if not key.startswith(_SECURITY) or key in known:
        return
    if key not in _INSTEAD and difflib.get_close_matches(key, known, n=1, cutoff=_TYPING_ERROR):
        return  # the unknown key gets a suggestion
    there_is = _INSTEAD.get(
        key,
        "use security.protocol=ssl with ssl.ca.location, and ssl.certificate.location and ssl.key.location for clients "
        "with certificates, or sasl_ssl with sasl.username and sasl.password.location for users",
    )
    raise InvalidConfig(f"not in this version: {name}; leave it out: {there_is}")


class Arguments(NamedTuple):
    """What a client's constructor was given, taken apart."""

    addresses: list[str]
    config: dict[str, object]
    """Options as they were spelled in a mapping, with dots or underscores."""
    keywords: dict[str, object]
    """Options that were keyword arguments."""


Bootstrap = str | Sequence[str] | Mapping[str, object] | None
"""The addresses; or a whole config that contains `bootstrap.servers`; or None if another argument has the addresses."""


def taken_apart(bootstrap: Bootstrap, config: Mapping[str, object] | None, keywords: Mapping[str, Any]) -> Arguments:
    """Return the addresses and the options of a constructor, which also accepts the arguments of other Kafka clients.

    The addresses are `bootstrap`, the keyword `bootstrap_servers`, or `bootstrap.servers` in the config. The config is
    `config`, `configs`, or a mapping in place of the addresses.

    Raises:
        InvalidConfig: an argument is missing, given twice or of the wrong type, or an address is not host:port.
    """
    rest = {name: value for name, value in keywords.items() if name not in ("bootstrap_servers", "configs")}
    given = [each for each in (config, keywords.get("configs")) if each is not None]
    if isinstance(bootstrap, Mapping):
        given.append(bootstrap)
    if len(given) > 1:
        raise InvalidConfig("the config is given twice; config, configs and a mapping as first argument are the same")
    if given and not isinstance(given[0], Mapping):
        raise InvalidConfig(f"config is {given[0]!r}: give a mapping from keys to values")
    options = dict(given[0]) if given else {}
    named = [options.pop(name) for name in ("bootstrap.servers", "bootstrap_servers") if name in options]
    where = [None if isinstance(bootstrap, Mapping) else bootstrap, keywords.get("bootstrap_servers"), *named]
    places = [each for each in where if each is not None]
    if len(places) != 1:
        problem = "are given twice" if places else "are missing"
        raise InvalidConfig(
            f"the addresses of the brokers {problem}: give bootstrap, bootstrap_servers, or bootstrap.servers in config"
        )
    return Arguments(parse_bootstrap(places[0]), options, rest)


def shown_as(name: str, addresses: Sequence[str], options: object, state: str) -> str:
    """Return the `repr` of a client: its class, addresses, identity and state, without secrets."""
    who = {each: getattr(options, each, "") for each in ("client_id", "group_id", "transactional_id")}
    words = [",".join(addresses), *(f"{each}={value!r}" for each, value in who.items() if value), state]
    return f"<{name} {' '.join(words)}>"


class ClientOptions:
    """The keys of every client; times in ms, sizes in bytes."""

    client_id = text(
        "raftlog-python",
        doc="Name of this client in the logs of brokers.",
    )
    request_timeout_ms = duration_ms(
        30_000,
        minimum=1,
        doc="How long one request may stay unanswered.",
    )
    retry_backoff_ms = duration_ms(
        50,
        minimum=0,
        doc="Pause before the first retry; it doubles with every further retry.",
    )
    retry_backoff_max_ms = duration_ms(
        1000,
        minimum=0,
        doc="Longest pause between retries.",
    )
    reconnect_backoff_ms = duration_ms(
        50,
        minimum=0,
        doc="Pause before a broken connection is opened again; it doubles with every further failure.",
    )
    reconnect_backoff_max_ms = duration_ms(
        250,
        minimum=0,
        doc="Longest pause between attempts to connect; a broker that is back is found within this time.",
    )

    # TLS and a login; docs/security.md

    security_protocol = text(
        "plaintext",
        choices=("plaintext", "ssl", "sasl_ssl"),
        ignore_case=True,
        doc="The protocol of the brokers' listeners: plaintext, TLS (ssl), or TLS with logins (sasl_ssl).",
    )
    ssl_ca_location = text(
        "",
        own=True,
        doc="PEM file with the certificates of the CAs that a broker's certificate is checked against; empty: gRPC's "
        "list of public CAs. With ssl and sasl_ssl. Read again when it changes.",
    )
    ssl_certificate_location = text(
        "",
        own=True,
        doc="PEM file with this client's certificate, followed by the intermediate certificates, and with the private "
        "key, unless ssl.key.location names another file; for brokers with ssl.client.auth=required. Read again when "
        "it changes.",
    )
    ssl_key_location = text(
        "",
        own=True,
        doc="PEM file with this client's private key. Read again when it changes.",
    )
    ssl_key_password_location = text(
        "",
        own=True,
        doc="File with the password of this client's private key, if that is encrypted (needs cryptography).",
    )
    ssl_key_password_command = text(
        "",
        own=True,
        doc="A command that prints the password of this client's private key, run without a shell; in place of "
        "ssl.key.password.location.",
    )
    sasl_mechanism = text(
        "SCRAM-SHA-512",
        choices=("SCRAM-SHA-512", "SCRAM-SHA-256", "OAUTHBEARER"),
        doc="The mechanism of the login, with sasl_ssl: SCRAM for a user with a password, which is never sent, or "
        "OAUTHBEARER for a JSON Web Token of an issuer that the brokers trust.",
    )
    sasl_oauthbearer_token_endpoint_url = text(
        "",
        doc="With OAUTHBEARER: https://HOST/PATH of an issuer, which is asked for tokens with the client's id and "
        "secret (OAuth's client credentials grant), or file:///PATH of a file with a token, read for every login.",
    )
    sasl_oauthbearer_token_command = text(
        "",
        own=True,
        doc="With OAUTHBEARER: a command that prints a token, run for every login, without a shell.",
    )
    sasl_oauthbearer_client_credentials_client_id = text(
        "",
        doc="With an issuer in sasl.oauthbearer.token.endpoint.url: the client's id there.",
    )
    sasl_oauthbearer_client_credentials_client_secret = text(
        "",
        secret=True,
        doc="With an issuer in sasl.oauthbearer.token.endpoint.url: the client's secret there.",
    )
    sasl_oauthbearer_scope = text(
        "",
        doc="With an issuer in sasl.oauthbearer.token.endpoint.url: the scope to ask for.",
    )
    sasl_username = text(
        "",
        mirrors="sasl.jaas.config",
        doc="The user that logs in; ACLs name it User:NAME. With sasl_ssl.",
    )
    sasl_password = text(
        "",
        mirrors="sasl.jaas.config",
        secret=True,
        doc="The user's password. A file is safer: set sasl.password.location instead.",
    )
    sasl_password_location = text(
        "",
        own=True,
        doc="File with the user's password, in place of sasl.password. Read again for every login.",
    )

    pauses: Pauses
    """Between retries, and before a broken connection is tried again."""
    pem: PemFiles | None
    """The files for TLS; None: plaintext."""
    sasl: Sasl | None
    """The login; None: no login."""


class ProducerOptions(Settings, ClientOptions):
    """The options of a producer."""

    acks = text(
        "all",
        of=ACKS.__getitem__,
        choices=tuple(ACKS),
        doc="Which replicas must have a record before it is acknowledged: all in-sync replicas (all), the leader (1), "
        "or none (0).",
    )
    enable_idempotence = switch(
        True,
        doc="Whether brokers recognise retries, so that every record is in the log once and in order; needs "
        "acks=all, retries, and at most 5 requests in flight.",
    )
    transactional_id = text(
        "",
        doc="Lets a producer send in transactions, under an id that stays the same over restarts: a new producer "
        "with the id fences the previous one and aborts its open transaction. Needs idempotence; empty: no "
        "transactions.",
    )
    transaction_timeout_ms = duration_ms(
        60_000,
        minimum=1,
        maximum=_MAX_INT32,
        doc="How long a transaction may stay open before its coordinator aborts it; at most the server's "
        "transaction.max.timeout.ms.",
    )
    linger_ms = number(
        5.0,
        minimum=0,
        doc="How long a batch waits for more records; a call that waits for its delivery, or flush, sends it at once.",
    )
    batch_size = size_bytes(
        64 << 10,
        minimum=1,
        maximum=_MAX_INT32,
        doc="Bytes at which a batch is full, before compression. While batches of an idempotent producer wait behind "
        "those in flight, up to four times as many, and up to sixteen times for records without key and partition.",
    )
    buffer_memory = size_bytes(
        64 << 20,
        minimum=1024,
        doc="Bytes of unacknowledged records at which `send` waits.",
    )
    max_block_ms = duration_ms(
        60_000,
        minimum=0,
        doc="How long `send` may wait for memory, or for the metadata of a topic.",
    )
    codec = text(
        "none",
        name="compression.type",
        of=CODECS.__getitem__,
        choices=tuple(CODECS),
        doc="Codec of the batches.",
    )
    level = integer_or_none(
        name="compression.level",
        own=True,
        doc="Level of the codec (gzip 1-9, zstd 1-22); none: the codec's default.",
    )
    max_in_flight_requests_per_connection = integer(
        5,
        minimum=1,
        maximum=100,
        doc="How many requests to one broker may be unanswered. The order is kept with any number, but with more than "
        "5 a producer is not idempotent.",
    )
    delivery_timeout_ms = duration_ms(
        120_000,
        minimum=1,
        doc="How long a delivery may take in all, retries included.",
    )
    retries = integer(
        _MAX_INT32,
        minimum=0,
        maximum=_MAX_INT32,
        doc="How many times a batch is retried; `delivery.timeout.ms` is the better limit.",
    )
    max_request_size = size_bytes(
        1 << 20,
        minimum=1024,
        maximum=_MAX_INT32,
        doc="Size limit of a request, and so of a record.",
    )
    metadata_max_age_ms = duration_ms(
        300_000,
        minimum=10,
        doc="How often the client asks for new metadata, even without errors.",
    )
    tracing = switch(
        False,
        own=True,
        doc="Whether records carry the trace of the current span, and sampled traces get spans; needs the extra "
        "`raftlog[otel]`, and an application that sets OpenTelemetry up.",
    )

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> ProducerOptions:
        """Return the options that the caller gave, over the defaults.

        Raises:
            InvalidConfig: an unknown key, a bad value, or options that contradict each other.
        """
        values = _resolve(PRODUCER_KEYS, config, options)
        made = _with_connections(cls(values), values)
        if made.delivery_timeout_ms < made.linger_ms:
            raise InvalidConfig(
                f"delivery.timeout.ms={made.delivery_timeout_ms} is less than linger.ms={made.linger_ms}: "
                "every record would time out before it is sent"
            )
        if made.batch_size > made.buffer_memory:
            raise InvalidConfig(f"batch.size={made.batch_size} is more than buffer.memory={made.buffer_memory}")
        given = _given(config, options)
        _check_transactional_id(made.transactional_id, "transactional_id" in given)
        return made.but(
            enable_idempotence=_idempotence(made, str(values["acks"]), "enable_idempotence" in given),
            batch_size=min(made.batch_size, made.max_request_size),
        )


class ConsumerOptions(Settings, ClientOptions):
    """The options of a consumer."""

    auto_offset_reset = text(
        "latest",
        choices=("latest", "earliest", "none"),
        doc="Where to begin in a partition without a position, or if the position is no longer in the log; none: "
        "`poll` raises `OffsetOutOfRange`.",
    )
    isolation_level = text(
        "read_committed",
        of=ISOLATION.__getitem__,
        choices=tuple(ISOLATION),
        doc="read_uncommitted also returns records of open and aborted transactions.",
    )
    client_rack = text(
        "",
        doc="The rack of this client, as in the brokers' `broker.rack`: it reads from an in-sync replica in this "
        "rack, if there is one; empty: from leaders only.",
    )
    max_poll_records = integer(
        500,
        minimum=1,
        doc="The most records that one `poll` returns.",
    )
    fetch_max_bytes = size_bytes(
        32 << 20,
        minimum=1024,
        doc="Bytes that may be fetched and not yet polled, over all partitions.",
    )
    max_partition_fetch_bytes = size_bytes(
        1 << 20,
        minimum=1024,
        maximum=_MAX_INT32,
        doc="The most bytes of one partition in one message, unless a single batch is larger.",
    )
    check_crcs = switch(
        True,
        doc="Whether the checksum of every batch is verified.",
    )
    consumer_timeout_ms = duration_ms_or_none(
        own=True,
        doc="How long iteration waits for a record before it ends; none: for ever.",
    )
    default_api_timeout_ms = duration_ms(
        60_000,
        minimum=1,
        doc="How long calls to the cluster may take, retries included.",
    )
    metadata_max_age_ms = duration_ms(
        5_000,
        minimum=10,
        doc="How often a subscription looks for new topics and partitions.",
    )
    group_id = text(
        "",
        doc="The group that shares the partitions and keeps the offsets; empty: none.",
    )
    group_instance_id = text(
        "",
        doc="Makes the consumer a static member: if it restarts within the session timeout, it gets its partitions "
        "back without a rebalance.",
    )
    group_remote_assignor = text(
        "",
        doc="How the coordinator distributes partitions: sticky, range, roundrobin, or another assignor of its "
        "server; empty: its default.",
    )
    enable_auto_commit = switch(
        True,
        doc="Whether a consumer with a group commits by itself the records that earlier polls have returned.",
    )
    auto_commit_interval_ms = duration_ms(
        5_000,
        minimum=0,
        doc="How often the consumer commits by itself.",
    )
    max_poll_interval_ms = duration_ms(
        300_000,
        minimum=1,
        maximum=_MAX_INT32,
        doc="How long a member of a group may take between two polls, or to release a partition. After that, other "
        "members get its partitions.",
    )
    tracing = switch(
        False,
        own=True,
        doc="Whether records carry the trace of the current span, and sampled traces get spans; needs the extra "
        "`raftlog[otel]`, and an application that sets OpenTelemetry up.",
    )

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> ConsumerOptions:
        """Return the options that the caller gave, over the defaults.

        Raises:
            InvalidConfig: an unknown key, a bad value, or options that contradict each other.
        """
        values = _resolve(CONSUMER_KEYS, config, options)
        return _with_connections(cls(values), values)


class AdminOptions(Settings, ClientOptions):
    """The options of an admin client."""

    default_api_timeout_ms = duration_ms(
        60_000,
        minimum=1,
        doc="How long a call may take, retries included.",
    )
    metadata_max_age_ms = duration_ms(
        0,
        minimum=0,
        doc="How old the metadata may be that a call uses instead of asking for them; five times that if they only "
        "tell which broker to ask. For programs that ask again and again. Own changes and errors end it.",
    )

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> AdminOptions:
        """Return the options that the caller gave, over the defaults.

        Raises:
            InvalidConfig: an unknown key, a bad value, or options that contradict each other.
        """
        values = _resolve(ADMIN_KEYS, config, options)
        return _with_connections(cls(values), values)


SECURITY_KEYS: Final = tuple(
    each.key for each in settings_of(ClientOptions) if each.key.name.startswith(("security.", "ssl.", "sasl."))
)
PRODUCER_KEYS: Final = ConfigDef("producer option", (each.key for each in settings_of(ProducerOptions)))
CONSUMER_KEYS: Final = ConfigDef("consumer option", (each.key for each in settings_of(ConsumerOptions)))
ADMIN_KEYS: Final = ConfigDef("admin option", (each.key for each in settings_of(AdminOptions)))


def _with_connections(options: C, values: Mapping[str, Any]) -> C:
    """Return the options with what follows from several keys: backoffs, files for TLS, the login."""
    return options.but(
        pauses=Pauses(
            retry=_backoff(options.retry_backoff_ms, options.retry_backoff_max_ms),
            reconnect=_backoff(options.reconnect_backoff_ms, options.reconnect_backoff_max_ms),
        ),
        pem=_pem_files(values, options.security_protocol),
        sasl=sasl_of(values, options.security_protocol),
        sasl_password="",  # `sasl` has it, and its repr omits it
        sasl_oauthbearer_client_credentials_client_secret="",  # likewise
    )


def _pem_files(values: Mapping[str, Any], protocol: str) -> PemFiles | None:
    ca, certificate, key = (values[name] for name in _PEM)
    if protocol in ("ssl", PROTOCOL):
        return PemFiles(_PEM, ca, certificate, key, values[KEY_PASSWORD], values[KEY_PASSWORD_COMMAND])
    passwords = (KEY_PASSWORD, KEY_PASSWORD_COMMAND)
    of_passwords = tuple(values[name] for name in passwords)
    for name, file in zip((*_PEM, *passwords), (ca, certificate, key, *of_passwords), strict=True):
        if file:
            raise InvalidConfig(f"{name}={file!r} has no effect without security.protocol=ssl; set both")
    return None


def _resolve(keys: ConfigDef, config: Mapping[str, object] | None, options: Mapping[str, object]) -> dict[str, Value]:
    """Return a value for every key; None counts as left out."""
    raw = dict(config or {})
    for name, value in options.items():
        if name.replace("_", ".") in {given.replace("_", ".") for given in raw}:
            raise InvalidConfig(f"{name} is given twice, as a keyword and in config")
        raw[name] = value
    for name, value in raw.items():
        refuse_security(name)
        if name.replace("_", ".") not in {key.name for key in keys}:
            refuse_kafkas(name)
            keys.key(name)
        if name == "acks" and isinstance(value, int) and not isinstance(value, bool):
            raw[name] = str(value)
    return keys.resolve({name: value for name, value in raw.items() if value is not None})


def _backoff(first_ms: float, max_ms: float) -> Backoff:
    return Backoff(first_ms, max(first_ms, max_ms), random.random)


def _given(config: Mapping[str, object] | None, options: Mapping[str, object]) -> set[str]:
    """Return the names, with underscores, of the options that the caller has set."""
    given = {**(config or {}), **options}
    return {name.replace(".", "_") for name, value in given.items() if value is not None}


def _idempotence(options: ProducerOptions, acks: str, explicit: bool) -> bool:
    """Return whether the producer is idempotent: by default only if the other options allow it.

    Raises:
        InvalidConfig: idempotence is requested together with an option that contradicts it.
    """
    from raftlog._core.accumulator import BATCHES_REMEMBERED  # here: it imports Arrow, which only producers need

    transactional = bool(options.transactional_id)
    if not options.enable_idempotence:
        if transactional:
            raise InvalidConfig(
                "transactional.id contradicts enable.idempotence=false: a retried record would be in the "
                "transaction twice; leave one of them out"
            )
        return False
    in_flight = options.max_in_flight_requests_per_connection
    if options.acks != log_pb2.ALL:
        conflict = f"acks={acks}: only acks=all keeps a record where it was acknowledged"
    elif in_flight > BATCHES_REMEMBERED:
        conflict = f"max.in.flight.requests.per.connection={in_flight}: brokers recognise {BATCHES_REMEMBERED} batches"
    elif options.retries == 0:
        conflict = "retries=0: without retries idempotence has no effect"
    else:
        return True
    if transactional:
        raise InvalidConfig(f"transactional.id contradicts {conflict}; leave one of them out")
    if explicit:
        raise InvalidConfig(f"enable.idempotence=true contradicts {conflict}; leave one of them out")
    return False


def _check_transactional_id(value: str, explicit: bool) -> None:
    """Check a transactional id; it is empty without one.

    Raises:
        InvalidConfig: the given id does not have 1 to 255 characters.
    """
    if len(value) > MAX_ID_CHARACTERS or (explicit and not value):
        raise InvalidConfig(f"transactional.id has 1 to {MAX_ID_CHARACTERS} characters, this one has {len(value)}")
