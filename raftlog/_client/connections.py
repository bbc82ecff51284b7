"""gRPC channels by address, and what gRPC's failures mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc

from raftlog.errors import (
    AuthorizationError,
    BrokerOverloaded,
    BrokerUnavailable,
    InternalError,
    InvalidConfig,
    RaftlogError,
    RequestTimedOut,
    UnsupportedVersion,
)

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: no client holds another one back
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
]


def parse_bootstrap(bootstrap: str | Sequence[str]) -> list[str]:
    """Return the addresses in "host:port,host:port" or in a list of such.

    Raises:
        InvalidConfig: an address without a port, or none at all.
    """
    items = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    addresses = [item.strip() for item in items if item.strip()]
    if not addresses:
        raise InvalidConfig("bootstrap is empty; name at least one broker as host:port")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidConfig(f"bootstrap address {address!r} is not host:port, for example 127.0.0.1:9092")
    return addresses


REFUSED: Final = "connection refused"
REFUSED_GRACE_S: Final = 2.0
"""How long a server may take to open its port that is just being started."""
_IN_WORDS: Final = {
    "connection refused": REFUSED,
    "domain name not found": "the host name is not known",
    "name or service not known": "the host name is not known",
    "no route to host": "no route to host",
    "network is unreachable": "the network is not reachable",
    "connection reset": "the connection was reset",
    "broken pipe": "the connection was reset",
    "socket closed": "the connection was closed",
    "connection timed out": "it does not answer",
}
"""What gRPC's texts come down to."""


class NobodyListens(BrokerUnavailable):
    """Every address has refused the connection: no server runs there, or not yet. Never travels."""


def nobody_answers(addresses: Sequence[str], reasons: Sequence[str]) -> BrokerUnavailable:
    """Return the error when all addresses were tried, and what came of each."""
    refused = bool(reasons) and all(reason.endswith(REFUSED) for reason in reasons)
    return (NobodyListens if refused else BrokerUnavailable)(
        f"no broker answers at {', '.join(addresses)}; check that the cluster runs, that the addresses and ports are "
        f"right and that no firewall is between ({'; '.join(reasons)})"
    )


def in_words(details: str) -> str:
    """Return what gRPC says of a connection in a few words; as it is, where there are none for it."""
    text = details.lower()
    return next((words for part, words in _IN_WORDS.items() if part in text), details)


def from_grpc(error: grpc.aio.AioRpcError | asyncio.TimeoutError | Exception, address: str) -> RaftlogError:
    """Return the error of the tree for a failed call."""
    if isinstance(error, RaftlogError):
        return error
    if not isinstance(error, grpc.RpcError):
        return BrokerUnavailable(f"the connection to {address} broke: {type(error).__name__}: {error}")
    code = error.code()
    details = error.details() or code.name
    match code:
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.CANCELLED
            | grpc.StatusCode.UNKNOWN
            | grpc.StatusCode.INTERNAL  # what gRPC says of a stream that was reset
        ):
            return BrokerUnavailable(f"no connection to {address}: {in_words(details)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            more = "" if details == "Deadline Exceeded" else f": {details}"
            return RequestTimedOut(f"{address} did not answer in time{more}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return BrokerOverloaded(f"{address}: {details}")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AuthorizationError(f"{address}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UnsupportedVersion(
                f"{address} does not know this call: it may be a node's inter.node.listener, while clients connect to "
                f"its listeners, or a server of another version or kind ({details})"
            )
        case _:
            return InternalError(f"{address}: {code.name}: {details}")


class Connections:
    """Channels of one client object. A channel reconnects by itself; it is closed with the client."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel to an address, made on first use."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return channel

    async def close(self) -> None:
        """Close all channels; calls in progress end."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
