"""Connections that never finish their handshakes."""

from __future__ import annotations

import asyncio

import pytest
from grpc import aio

from broker.config.config import BrokerConfig
from broker.net import listeners

CONFIG = {"node.id": 1, "log.dirs": "/data"}


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_silent_connection_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_MS", 200)
    server = aio.server(options=listeners.server_options(BrokerConfig.from_values(CONFIG), 100))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(60):
            while await reader.read(4096):
                pass  # the server's own part of the handshake
        writer.close()
    finally:
        await server.stop(None)
