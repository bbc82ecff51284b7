"""Channels with TLS, for clients, which may log in over them, and between nodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import grpc

from raftlog._client.logins import Logins
from raftlog._client.pem import FreshPem, PemFiles
from raftlog._client.sasl import Sasl

Options = Sequence[tuple[str, Any]]
_LOGIN_OPTIONS: Final[list[tuple[str, Any]]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


class ChannelTls:
    """Opens channels with the certificates that are in the files by then. The server's name is always checked."""

    def __init__(self, pem: FreshPem | PemFiles, sasl: Sasl | None = None) -> None:
        """Read the files. Raises InvalidConfig as `FreshPem`, and as `Logins` with `sasl`: who logs in."""
        self._pem = pem if isinstance(pem, FreshPem) else FreshPem(pem)
        self._lock = threading.Lock()
        self._made: tuple[int, grpc.ChannelCredentials] | None = None
        self._logins = None if sasl is None else Logins(sasl, self._open_for_login)

    @property
    def version(self) -> int:
        """Rises when the certificates change; channels of before reconnect with those of before."""
        return self._pem.current()[1]

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        """Return a new channel to an address, host:port."""
        credentials = self._credentials()
        if self._logins is not None:
            credentials = grpc.composite_channel_credentials(credentials, self._logins.credentials(address))
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _open_for_login(self, address: str) -> grpc.Channel:
        return grpc.secure_channel(address, self._credentials(), options=_LOGIN_OPTIONS)

    def _credentials(self) -> grpc.ChannelCredentials:
        pem, version = self._pem.current()
        with self._lock:
            if self._made is None or self._made[0] != version:
                made = grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.certificate or None)
                self._made = version, made
            return self._made[1]


def dial(address: str, options: Options, tls: ChannelTls | None) -> grpc.aio.Channel:
    """Return a new channel to an address, host:port; in plaintext without `tls`."""
    return grpc.aio.insecure_channel(address, options=options) if tls is None else tls.open(address, options)
