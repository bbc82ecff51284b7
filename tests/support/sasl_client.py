"""A client that authenticates without the SDK: SCRAM by hand over gRPC's stubs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from scramp import ScramClient

from raftlog.errors import from_wire
from raftlog.v1 import security_pb2, security_pb2_grpc

TIMEOUT_S = 60.0


def secure_channel(address: str, ca_file: Path, certificate: Path | None = None) -> aio.Channel:
    """Return a channel with TLS; `certificate` is a file with a certificate and its key."""
    pem = None if certificate is None else certificate.read_bytes()
    return aio.secure_channel(address, grpc.ssl_channel_credentials(ca_file.read_bytes(), pem, pem))


async def log_in(
    channel: aio.Channel, user: str, password: str, mechanism: str = "SCRAM-SHA-512"
) -> security_pb2.AuthenticateResponse:
    """Return the answer with a token; the server has proved that it knows the password too.

    Raises:
        RaftlogError: what the answer says.
    """
    stub: Any = security_pb2_grpc.SecurityStub(channel)
    client = ScramClient([mechanism], user, password)
    first = security_pb2.AuthenticateRequest(mechanism=mechanism, message=client.get_client_first().encode())
    answer = await stub.Authenticate(first, timeout=TIMEOUT_S)
    _check(answer)
    client.set_server_first(answer.message.decode())
    final = security_pb2.AuthenticateRequest(exchange_id=answer.exchange_id, message=client.get_client_final().encode())
    done: security_pb2.AuthenticateResponse = await stub.Authenticate(final, timeout=TIMEOUT_S)
    _check(done)
    client.set_server_final(done.message.decode())
    return done


async def token_of(channel: aio.Channel, user: str, password: str) -> list[tuple[str, str]]:
    """Return the metadata of calls, with a token."""
    return bearer((await log_in(channel, user, password)).token)


def _check(answer: security_pb2.AuthenticateResponse) -> None:
    if answer.HasField("error"):
        raise from_wire(answer.error)


def bearer(token: str) -> list[tuple[str, str]]:
    """Return the metadata that shows a token."""
    return [("authorization", f"Bearer {token}")]
