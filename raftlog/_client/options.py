"""What the clients can be told: Kafka's keys, with underscores as keyword arguments, or with dots in `config`."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from raftlog._client.kafkas_keys import refuse_kafkas
from raftlog._client.option_keys import (
    ACKS,
    ADMIN_KEYS,
    CODECS,
    CONSUMER_KEYS,
    ISOLATION,
    PRODUCER_KEYS,
    SECURITY_KEYS,
)
from raftlog._client.pem import Names as PemNames
from raftlog._client.pem import PemFiles
from raftlog._client.sasl import PROTOCOL, Sasl, take_sasl
from raftlog._core.backoff import Backoff, Pauses
from raftlog._core.numbering import BATCHES_REMEMBERED
from raftlog._core.staging import MAX_ID_CHARACTERS
from raftlog.config import ConfigDef, Value
from raftlog.errors import InvalidConfig
from raftlog.format import Codec
from raftlog.v1 import common_pb2, log_pb2

__all__ = [
    "ADMIN_KEYS",
    "CONSUMER_KEYS",
    "PRODUCER_KEYS",
    "AdminOptions",
    "ConsumerOptions",
    "ProducerOptions",
    "refuse_security",
]


_TYPING_ERROR: Final = 0.85
"""How like a name is to one that was mistyped."""
_SECURITY: Final = ("security.", "sasl.", "ssl.")
_PEM: Final = PemNames("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
_INSTEAD: Final = {
    "ssl.truststore.location": "ssl.ca.location names a PEM file with the CAs' certificates",
    "ssl.truststore.certificates": "ssl.ca.location names a PEM file with the CAs' certificates",
    "ssl.keystore.location": "ssl.certificate.location and ssl.key.location name PEM files",
    "ssl.keystore.certificate.chain": "ssl.certificate.location names a PEM file",
    "ssl.keystore.key": "ssl.key.location names a PEM file",
    "ssl.key.password": "the key in ssl.key.location is not encrypted; keep others from reading the file",
    "ssl.keystore.password": "the key in ssl.key.location is not encrypted; keep others from reading the file",
    "sasl.jaas.config": "sasl.username and sasl.password.location say who logs in",
    "sasl.mechanisms": "sasl.mechanism has the one mechanism that is used",
    "ssl.endpoint.identification.algorithm": "the name of a broker is always checked against its certificate",
}


def refuse_security(name: str) -> None:
    """Refuse Kafka's keys for encryption and authentication that these clients lack, and say what there is.

    Raises:
        InvalidConfig: it is one of them.
    """
    key = name.lower().replace("_", ".")
    known = [each.name for each in SECURITY_KEYS]
    if not key.startswith(_SECURITY) or key in known:
        return
    if key not in _INSTEAD and difflib.get_close_matches(key, known, n=1, cutoff=_TYPING_ERROR):
        return  # it is answered with what it was to be
    there_is = _INSTEAD.get(
        key,
        "there is security.protocol=ssl with ssl.ca.location, and ssl.certificate.location and ssl.key.location for "
        "clients that brokers are to know, and sasl_ssl with sasl.username and sasl.password.location for users",
    )
    raise InvalidConfig(f"not in this version: {name}; leave it out: {there_is}")


def _security(values: dict[str, Any]) -> tuple[PemFiles | None, Sasl | None]:
    """Take the values for TLS and for a login out; return which files there are, None: plaintext, and who logs in.

    Raises:
        InvalidConfig: files or a login, and nothing to use them for; or a login that lacks something.
    """
    protocol = values.pop("security_protocol")
    return _pem_files(values, protocol), take_sasl(values, protocol)


def _pem_files(values: dict[str, Any], protocol: str) -> PemFiles | None:
    ca, certificate, key = (values.pop(name.replace(".", "_")) for name in _PEM)
    if protocol in ("ssl", PROTOCOL):
        return PemFiles(_PEM, ca, certificate, key)
    for name, file in zip(_PEM, (ca, certificate, key), strict=True):
        if file:
            raise InvalidConfig(f"{name}={file!r} without security.protocol=ssl: nothing would be encrypted; set both")
    return None


def _resolve(keys: ConfigDef, config: Mapping[str, object] | None, options: Mapping[str, object]) -> dict[str, Any]:
    """Return a value for every key; one that is None is taken for left out."""
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
    values: dict[str, Value] = keys.resolve({name: value for name, value in raw.items() if value is not None})
    return {name.replace(".", "_"): value for name, value in values.items()}


def _pauses(values: dict[str, Any]) -> Pauses:
    """Take the four backoff values out and return what they say."""

    def backoff(name: str) -> Backoff:
        first_ms, max_ms = values.pop(f"{name}_backoff_ms"), values.pop(f"{name}_backoff_max_ms")
        return Backoff(first_ms, max(first_ms, max_ms), random.random)

    return Pauses(retry=backoff("retry"), reconnect=backoff("reconnect"))


def _given(config: Mapping[str, object] | None, options: Mapping[str, object]) -> set[str]:
    """Return the names, with underscores, of what the caller has set."""
    given = {**(config or {}), **options}
    return {name.replace(".", "_") for name, value in given.items() if value is not None}


def _idempotence(values: dict[str, Any], explicit: bool) -> bool:
    """Return whether the producer is idempotent; what it cannot be with only matters to who has asked for it.

    Raises:
        InvalidConfig: it is asked for, with something that contradicts it.
    """
    transactional = bool(values["transactional_id"])
    if not values["enable_idempotence"]:
        if transactional:
            raise InvalidConfig(
                "transactional.id contradicts enable.idempotence=false: a record that was sent again would be in the "
                "transaction twice; leave one of them out"
            )
        return False
    in_flight = values["max_in_flight_requests_per_connection"]
    if ACKS[values["acks"]] != log_pb2.ALL:
        conflict = f"acks={values['acks']}: only acks=all says that a record stays where it was acknowledged"
    elif in_flight > BATCHES_REMEMBERED:
        conflict = f"max.in.flight.requests.per.connection={in_flight}: brokers know {BATCHES_REMEMBERED} batches again"
    elif values["retries"] == 0:
        conflict = "retries=0: nothing is sent again that could be recognised"
    else:
        return True
    if transactional:
        raise InvalidConfig(f"transactional.id contradicts {conflict}; leave one of them out")
    if explicit:
        raise InvalidConfig(f"enable.idempotence=true contradicts {conflict}; leave one of them out")
    return False


def _transactional_id(value: str, explicit: bool) -> str:
    """Check a transactional id; without one it is empty.

    Raises:
        InvalidConfig: one was given that does not have 1 to 255 characters.
    """
    if len(value) > MAX_ID_CHARACTERS or (explicit and not value):
        raise InvalidConfig(f"transactional.id has 1 to {MAX_ID_CHARACTERS} characters, this one has {len(value)}")
    return value


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """`PRODUCER_KEYS`, typed: sizes in bytes, times in ms."""

    client_id: str
    acks: log_pb2.Acks.ValueType
    enable_idempotence: bool
    transactional_id: str
    """Empty: no transactions."""
    transaction_timeout_ms: int
    linger_ms: float
    batch_size: int
    buffer_memory: int
    max_block_ms: float
    codec: Codec
    level: int | None
    max_in_flight_requests_per_connection: int
    request_timeout_ms: float
    delivery_timeout_ms: float
    retries: int
    max_request_size: int
    metadata_max_age_ms: float
    pauses: Pauses
    pem: PemFiles | None = None
    """With TLS, which files; None: plaintext."""
    sasl: Sasl | None = None
    """Who logs in; None: nobody."""
    tracing: bool = False

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> ProducerOptions:
        """Return the options from what the caller gave.

        Raises:
            InvalidConfig: unknown, out of range, or two that contradict each other.
        """
        values = _resolve(PRODUCER_KEYS, config, options)
        pem, sasl = _security(values)
        if values["delivery_timeout_ms"] < values["linger_ms"]:
            raise InvalidConfig(
                f"delivery.timeout.ms={values['delivery_timeout_ms']} is less than linger.ms={values['linger_ms']}: "
                "every record would time out before it is sent"
            )
        if values["batch_size"] > values["buffer_memory"]:
            raise InvalidConfig(
                f"batch.size={values['batch_size']} is more than buffer.memory={values['buffer_memory']}"
            )
        return cls(
            client_id=values["client_id"],
            acks=ACKS[values["acks"]],
            enable_idempotence=_idempotence(values, "enable_idempotence" in _given(config, options)),
            transactional_id=_transactional_id(
                values["transactional_id"], "transactional_id" in _given(config, options)
            ),
            transaction_timeout_ms=int(values["transaction_timeout_ms"]),
            linger_ms=values["linger_ms"],
            batch_size=min(values["batch_size"], values["max_request_size"]),
            buffer_memory=values["buffer_memory"],
            max_block_ms=values["max_block_ms"],
            codec=CODECS[values["compression_type"]],
            level=values["compression_level"],
            max_in_flight_requests_per_connection=values["max_in_flight_requests_per_connection"],
            request_timeout_ms=values["request_timeout_ms"],
            delivery_timeout_ms=values["delivery_timeout_ms"],
            retries=values["retries"],
            max_request_size=values["max_request_size"],
            metadata_max_age_ms=values["metadata_max_age_ms"],
            pauses=_pauses(values),
            pem=pem,
            sasl=sasl,
            tracing=values["tracing"],
        )


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """`CONSUMER_KEYS`, typed: sizes in bytes, times in ms."""

    client_id: str
    auto_offset_reset: str
    isolation_level: common_pb2.IsolationLevel.ValueType
    client_rack: str
    max_poll_records: int
    fetch_max_bytes: int
    max_partition_fetch_bytes: int
    check_crcs: bool
    consumer_timeout_ms: float | None
    default_api_timeout_ms: float
    request_timeout_ms: float
    metadata_max_age_ms: float
    group_id: str
    group_instance_id: str
    group_remote_assignor: str
    enable_auto_commit: bool
    auto_commit_interval_ms: float
    max_poll_interval_ms: float
    pauses: Pauses
    pem: PemFiles | None = None
    """With TLS, which files; None: plaintext."""
    sasl: Sasl | None = None
    """Who logs in; None: nobody."""
    tracing: bool = False

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> ConsumerOptions:
        """Return the options from what the caller gave.

        Raises:
            InvalidConfig: unknown or out of range.
        """
        values = _resolve(CONSUMER_KEYS, config, options)
        pem, sasl = _security(values)
        isolation = ISOLATION[values.pop("isolation_level")]
        return cls(isolation_level=isolation, pauses=_pauses(values), pem=pem, sasl=sasl, **values)


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """`ADMIN_KEYS`, typed: times in ms."""

    client_id: str
    request_timeout_ms: float
    default_api_timeout_ms: float
    pauses: Pauses
    pem: PemFiles | None = None
    """With TLS, which files; None: plaintext."""
    sasl: Sasl | None = None
    """Who logs in; None: nobody."""

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> AdminOptions:
        """Return the options from what the caller gave.

        Raises:
            InvalidConfig: unknown or out of range.
        """
        values = _resolve(ADMIN_KEYS, config, options)
        pem, sasl = _security(values)
        return cls(
            client_id=values["client_id"],
            request_timeout_ms=values["request_timeout_ms"],
            default_api_timeout_ms=values["default_api_timeout_ms"],
            pauses=_pauses(values),
            pem=pem,
            sasl=sasl,
        )
