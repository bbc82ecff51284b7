"""A port that cannot be had is told with the reason of the operating system; one for both protocols ends in silence."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NoReturn

import pytest

from broker.listening import LOOPBACK, EitherFront, why_not


def no_such_name(*_: object, **__: object) -> NoReturn:
    """As the resolver says, without a server to ask."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_the_reason_is_the_operating_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert why_not("127.0.0.1", taken.getsockname()[1]) == "address already in use"
    assert why_not("192.0.2.1", 0) == "cannot assign requested address"
    assert "gRPC refused it" in why_not("127.0.0.1", 0)
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    assert why_not("nobody.invalid", 9092) == "name or service not known"


def test_connections_that_a_close_ends_are_no_errors() -> None:
    """The broker's log would have a traceback for each: asyncio reports what the task of a connection ends with."""
    reported: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while piece := await reader.read(100):
                writer.write(piece)
            writer.close()

        front = EitherFront(LOOPBACK, 0)
        behind = await asyncio.start_server(echo, LOOPBACK, 0)
        front.plaintext_port = behind.sockets[0].getsockname()[1]
        await front.open()
        ends = [await asyncio.open_connection(LOOPBACK, front.port) for _ in range(2)]
        (silent, _), (speaking, out) = ends
        out.write(b"PRI")
        assert await speaking.readexactly(3) == b"PRI"
        assert len(front._connections) == 2
        await front.close()
        assert [await speaking.read(), await silent.read()] == [b"", b""]
        for _, writer in ends:
            writer.close()
        behind.close()
        await behind.wait_closed()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert reported == []
