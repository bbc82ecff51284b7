"""A node's TLS: the certificate that its listeners present, and that it presents to other nodes.

Certificate files are read again when they change: new connections get the new certificate, open ones go on.

Every certificate is checked before use by a handshake of the node with itself, in memory: a peer would refuse a bad one
too, but with less of a reason. The standard library suffices; it shows the content of verified certificates only.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from broker.config.checks import WITH_TLS
from broker.config.config import BrokerConfig
from broker.config.endpoints import SSL
from broker.net.revocation import RevocationLists
from raftlog._client.security import (
    EXPIRED,
    NOT_YET_VALID,
    TRY_AGAIN_S,
    WRONG_PURPOSE,
    ChannelTls,
    FreshPem,
    Names,
    Pem,
    PemFiles,
    shake_hands,
)
from raftlog.errors import InvalidConfig
from raftmeta.quorum.peer_identity import NODE_URI, node_ids_named


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a certificate. `until`: as OpenSSL writes it; `names`: DNS names and IP addresses."""

    until: str
    names: tuple[str, ...]
    node_ids: frozenset[int]


def look_at(files: PemFiles, pem: Pem) -> Facts:
    """Return the content of a certificate.

    Raises:
        InvalidConfig: the certificate has expired, is not valid yet, or cannot be used.
    """
    server = _server(files)
    client = _client()
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the client trusts this very certificate, of any issuer
    client.load_verify_locations(cadata=pem.certificate.decode("ascii", "ignore"))
    try:
        found = shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise InvalidConfig(f"{_named(files)} {_in_words(error)}") from None
    except ssl.SSLError as error:
        raise InvalidConfig(f"{_named(files)} cannot be used: {error.reason or error}") from None
    alternatives = found.get("subjectAltName", ())
    common_names = [value for part in found.get("subject", ()) for name, value in part if name == "commonName"]
    return Facts(
        until=str(found.get("notAfter", "")),
        names=tuple(value for kind, value in alternatives if kind in ("DNS", "IP Address")),
        node_ids=node_ids_named([value for kind, value in alternatives if kind == "URI"], common_names),
    )


def check_trusted(files: PemFiles, pem: Pem) -> None:
    """Check that a peer that trusts the CAs accepts this certificate, as a server's and as a client's.

    Raises:
        InvalidConfig: the peer would refuse it.
    """
    server, client = _server(files), _client()
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (server, client):
        context.load_verify_locations(cadata=pem.ca.decode("ascii", "ignore"))
    client.load_cert_chain(files.certificate, files.key_file, password=files.password())
    try:
        shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        trusts = f"with the CAs in {files.names.ca}={files.ca!r}"
        raise InvalidConfig(f"{_named(files)} {_in_words(error)}; other nodes {trusts} would refuse it") from None
    except ssl.SSLError as error:
        raise InvalidConfig(f"{_named(files)} cannot be used: {error.reason or error}") from None


def _named(files: PemFiles) -> str:
    return f"{files.names.certificate}={files.certificate!r}: the certificate"


def _in_words(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code == EXPIRED:
            return "has expired, or one of its CAs has; issue a new one, unless this machine's clock is wrong"
        case code if code == NOT_YET_VALID:
            return "is not valid yet; check this machine's clock"
        case code if code == WRONG_PURPOSE:
            return (
                "is not issued for both uses: nodes are servers and clients to each other, issue it with "
                "extendedKeyUsage = serverAuth, clientAuth"
            )
        case _:
            return f"is not issued by a trusted CA ({error.verify_message})"


def _server(files: PemFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key_file, password=files.password())
    return context


def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return context


logger = logging.getLogger(__name__)

_NAMES: Final = Names("ssl.truststore.location", "ssl.keystore.location", "ssl.keystore.key.location")


class NodeTls:
    """The certificates of one node; `channels`, for connections to other nodes, is None where these are plaintext."""

    def __init__(self, config: BrokerConfig) -> None:
        """Read and check the certificates. Raises InvalidConfig if one is missing or peers would refuse it."""
        self._config = config
        self._expires_ms = 0
        self._among_nodes = config.inter_node_listener is not None and (
            config.security_inter_broker_protocol == SSL or config.listener_security_migration
        )
        self._files = PemFiles(
            _NAMES,
            config.ssl_truststore_location,
            config.ssl_keystore_location,
            config.ssl_keystore_key_location,
            config.ssl_key_password_location,
            config.ssl_key_password_command,
        )
        self._pem = FreshPem(self._files, self._check)
        self.revoked: RevocationLists | None = None
        """The certificates of clients and nodes that are refused, if lists are configured."""
        if config.ssl_crl_location:
            self.revoked = RevocationLists(config.ssl_crl_location, config.ssl_truststore_location)
        to_nodes = self._among_nodes and config.security_inter_broker_protocol == SSL
        self.channels: ChannelTls | None = ChannelTls(self._pem) if to_nodes else None

    @property
    def expires_ms(self) -> int:
        """Unix time at which the certificate in use expires; reads changed files first."""
        self._pem.current()
        return self._expires_ms

    def client_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the listener for clients; it asks for a certificate where the config says so."""
        return self._credentials(ask=self._config.asks_for_certificates)

    def kafka_contexts(self) -> KafkaContexts:
        """Return what makes the TLS contexts of the listener for Kafka clients."""
        return KafkaContexts(self._pem, self._files, ask=self._config.asks_kafka_for_certificates)

    def inter_node_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the listener for nodes; it always asks for a certificate."""
        return self._credentials(ask=True)

    def _credentials(self, *, ask: bool) -> grpc.ServerCredentials:
        offered = _Offered(self._pem, ask)
        return grpc.dynamic_ssl_server_credentials(
            offered.first,
            offered.fetch,  # type: ignore[arg-type] # None means "no change", which the stubs do not know
            require_client_authentication=ask,
        )

    def _check(self, pem: Pem) -> None:
        files, config = self._files, self._config
        facts = look_at(files, pem)
        if self._among_nodes:
            check_trusted(files, pem)
            if config.node_id not in facts.node_ids:
                named = ", ".join(map(str, sorted(facts.node_ids))) or "none"
                raise InvalidConfig(
                    f"{files.names.certificate}={files.certificate!r}: the certificate does not name this node "
                    f"(it names nodes: {named}); issue one with the URI {NODE_URI}{config.node_id} among its subject "
                    "alternative names"
                )
        self._warn(facts)
        self._expires_ms = int(ssl.cert_time_to_seconds(facts.until)) * 1_000
        logger.info("certificate", extra={"file": files.certificate, "until": facts.until, "names": list(facts.names)})

    def _warn(self, facts: Facts) -> None:
        """Log the advertised addresses that the certificate does not name."""
        config = self._config
        advertised = {}
        if config.is_broker and config.listener_security_protocol in WITH_TLS:
            advertised["clients"] = (config.advertised_listener or config.listener)[0]
        if config.is_broker and config.kafka_listener is not None and config.kafka_speaks_tls:
            advertised["Kafka clients"] = (config.advertised_kafka_listener or config.kafka_listener)[0]
        if self._among_nodes and config.advertised_inter_node_listener is not None:
            advertised["other nodes"] = config.advertised_inter_node_listener[0]
        for peers, host in advertised.items():
            if not any(_covers(name, host) for name in facts.names):
                logger.warning(
                    "the certificate does not name %s, which %s connect to, so they will refuse it; issue one with "
                    "this name among its subject alternative names",
                    host,
                    peers,
                )


class _Offered:
    """The certificate that one listener presents; gRPC calls `fetch` before every handshake, on its own threads."""

    def __init__(self, pem: FreshPem, ask: bool) -> None:
        self._pem = pem
        self._ask = ask
        self._lock = threading.Lock()
        found, self._version = pem.current()
        self.first = self._configuration(found)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificate if it has changed since the last call, or None."""
        with self._lock:
            found, version = self._pem.current()
            if version == self._version:
                return None
            self._version = version
            return self._configuration(found)

    def _configuration(self, pem: Pem) -> grpc.ServerCertificateConfiguration:
        trusted = pem.ca if self._ask else None
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=trusted)


class KafkaContexts:
    """The TLS context of new connections of Kafka clients, with the current certificate and CAs. Thread-safe."""

    def __init__(
        self, pem: FreshPem, files: PemFiles, *, ask: bool, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises InvalidConfig: the files have changed since they were checked, to something that is not valid."""
        self._pem = pem
        self._files = files
        self._ask = ask
        self._lock = threading.Lock()
        self._clock_s = clock_s
        self._failed_s = -math.inf
        found, self._version = pem.current()
        try:
            self._context = self._made(found)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(f"{_named(files)} cannot be used: {error}") from None

    def current(self) -> ssl.SSLContext:
        """Return the context for a new connection; reads changed files first."""
        with self._lock:
            found, version = self._pem.current()
            if version != self._version and self._clock_s() - self._failed_s >= TRY_AGAIN_S:
                try:
                    self._context = self._made(found)
                    self._version = version
                except (InvalidConfig, OSError) as error:
                    # The files change again, or the command fails that prints the key's password; it costs a process.
                    self._failed_s = self._clock_s()
                    logger.error(
                        "the certificates have changed, but Kafka clients get the previous ones for %.0f s: %s",
                        TRY_AGAIN_S,
                        error,
                    )
            return self._context

    def _made(self, pem: Pem) -> ssl.SSLContext:
        context = _server(self._files)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        if self._ask:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=pem.ca.decode("ascii", "ignore"))
            # A resumed session takes the client's certificate for valid. Sessions of TLS 1.2 cannot be turned off here;
            # `Door.session` looks at the certificate's end.
            context.num_tickets = 0
        return context


def node_tls(config: BrokerConfig) -> NodeTls | None:
    """Return the TLS of a node, or None if none of its listeners uses TLS.

    Raises:
        InvalidConfig: a certificate is missing, or peers would refuse it.
    """
    protocols = [config.security_inter_broker_protocol] if config.inter_node_listener is not None else []
    if config.is_broker:
        protocols += [config.listener_security_protocol, config.kafka_security_protocol]
    return NodeTls(config) if not set(WITH_TLS).isdisjoint(protocols) or config.listener_security_migration else None


def _covers(name: str, host: str) -> bool:
    """Whether a certificate's name covers a host; `*` stands for the host's first label."""
    name, host = name.lower().rstrip("."), host.lower().rstrip(".")
    return name == host or (name.startswith("*.") and "." in host and host.partition(".")[2] == name[2:])
