"""A port that cannot be had is told with the reason of the operating system."""

from __future__ import annotations

import socket

from broker.listening import why_not


def test_the_reason_is_the_operating_systems() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert why_not("127.0.0.1", taken.getsockname()[1]) == "address already in use"
    assert why_not("192.0.2.1", 0) == "cannot assign requested address"
    assert "known" in why_not("nobody.invalid", 9092)
    assert "gRPC refused it" in why_not("127.0.0.1", 0)
