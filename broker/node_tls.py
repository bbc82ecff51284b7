"""TLS of a node: what its listeners show, and what it shows to other nodes.

Certificates are read again when they change: a new connection gets the new ones, those that stand go on.
"""

from __future__ import annotations

import logging
import ssl
import threading
from typing import Final

import grpc

from broker.certificates import Facts, check_trusted, look_at
from broker.config import BrokerConfig
from broker.security_keys import SSL, WITH_TLS
from raftlog._client.pem import FreshPem, Names, Pem, PemFiles
from raftlog._client.tls import ChannelTls
from raftlog.errors import InvalidConfig
from raftmeta.quorum.peer_identity import NODE_URI

logger = logging.getLogger(__name__)

_NAMES: Final = Names("ssl.truststore.location", "ssl.keystore.location", "ssl.keystore.key.location")


class NodeTls:
    """The certificates of one node; `channels` to other nodes is None where these are in plaintext."""

    def __init__(self, config: BrokerConfig) -> None:
        """Read and check them. Raises InvalidConfig: they are missing, or nobody would accept them."""
        self._config = config
        self._expires_ms = 0
        self._among_nodes = config.inter_node_listener is not None and (
            config.security_inter_broker_protocol == SSL or config.listener_security_migration
        )
        self._files = PemFiles(
            _NAMES, config.ssl_truststore_location, config.ssl_keystore_location, config.ssl_keystore_key_location
        )
        self._pem = FreshPem(self._files, self._check)
        to_nodes = self._among_nodes and config.security_inter_broker_protocol == SSL
        self.channels: ChannelTls | None = ChannelTls(self._pem) if to_nodes else None

    @property
    def expires_ms(self) -> int:
        """Unix time until which the certificate in use counts; looks whether there is a new one."""
        self._pem.current()
        return self._expires_ms

    def client_credentials(self) -> grpc.ServerCredentials:
        """Return what the listener for clients shows, and asks for."""
        return self._credentials(ask=self._config.asks_for_certificates)

    def inter_node_credentials(self) -> grpc.ServerCredentials:
        """Return what the listener for nodes shows; it always asks for a certificate."""
        return self._credentials(ask=True)

    def _credentials(self, *, ask: bool) -> grpc.ServerCredentials:
        offered = _Offered(self._pem, ask)
        return grpc.dynamic_ssl_server_credentials(
            offered.first,
            offered.fetch,  # type: ignore[arg-type] # None is for "no change", which the stubs do not know
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
                    f"(nodes in it: {named}); issue one with the URI {NODE_URI}{config.node_id} among its subject "
                    "alternative names"
                )
        self._warn(facts)
        self._expires_ms = int(ssl.cert_time_to_seconds(facts.until)) * 1_000
        logger.info("certificate", extra={"file": files.certificate, "until": facts.until, "names": list(facts.names)})

    def _warn(self, facts: Facts) -> None:
        """Say which of the addresses that others are told the certificate does not name."""
        config = self._config
        told = {}
        if config.is_broker and config.listener_security_protocol in WITH_TLS:
            told["clients"] = (config.advertised_listener or config.listener)[0]
        if self._among_nodes and config.advertised_inter_node_listener is not None:
            told["other nodes"] = config.advertised_inter_node_listener[0]
        for who, host in told.items():
            if not any(_covers(name, host) for name in facts.names):
                logger.warning(
                    "the certificate does not name %s, which %s connect to: they will refuse it; issue one with that "
                    "among its subject alternative names",
                    host,
                    who,
                )


class _Offered:
    """What one listener offers; gRPC asks before every handshake, from threads of its own."""

    def __init__(self, pem: FreshPem, ask: bool) -> None:
        self._pem = pem
        self._ask = ask
        self._lock = threading.Lock()
        found, self._version = pem.current()
        self.first = self._configuration(found)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what has changed since the last call, or None."""
        with self._lock:
            found, version = self._pem.current()
            if version == self._version:
                return None
            self._version = version
            return self._configuration(found)

    def _configuration(self, pem: Pem) -> grpc.ServerCertificateConfiguration:
        trusted = pem.ca if self._ask else None
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=trusted)


def node_tls(config: BrokerConfig) -> NodeTls | None:
    """Return the TLS of a node, or None where none of its listeners speaks it.

    Raises:
        InvalidConfig: a certificate is missing, or nobody would accept it.
    """
    protocols = [config.security_inter_broker_protocol] if config.inter_node_listener is not None else []
    if config.is_broker:
        protocols.append(config.listener_security_protocol)
    return NodeTls(config) if not set(WITH_TLS).isdisjoint(protocols) or config.listener_security_migration else None


def _covers(name: str, host: str) -> bool:
    """Whether a name of a certificate stands for a host; `*` for its first label."""
    name, host = name.lower().rstrip("."), host.lower().rstrip(".")
    return name == host or (name.startswith("*.") and "." in host and host.partition(".")[2] == name[2:])
