"""A cut network delivers nothing and breaks nothing; healed, it delivers what it held."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from raftlog.testing.proxy import Network


@pytest.fixture
def echo() -> Iterator[int]:
    """A server on loopback that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return connection.recv(100)


def test_a_cut_is_silent_and_healing_delivers_what_was_held(echo: int) -> None:
    network = Network([1, 2, 3], {1: 1, 2: echo})
    try:
        assert network.ports[2][2] == echo, "a node must reach itself without a proxy"
        with (
            socket.create_connection(("127.0.0.1", network.ports[1][2]), 30) as one,
            socket.create_connection(("127.0.0.1", network.ports[3][2]), 30) as three,
        ):
            assert ask(one, b"a") == b"a"
            assert ask(three, b"b") == b"b"
            network.cut([1], [2])
            assert ask(three, b"c") == b"c", "nodes that are not cut must still reach each other"
            one.settimeout(0.2)
            with pytest.raises(TimeoutError):
                ask(one, b"d")
            network.heal()
            one.settimeout(30)
            assert one.recv(100) == b"d"
    finally:
        network.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", network.ports[1][2]), 1)


def test_a_cut_can_be_one_way(echo: int) -> None:
    network = Network([1, 2], {1: echo, 2: echo})
    try:
        with (
            socket.create_connection(("127.0.0.1", network.ports[1][2]), 30) as made_by_one,
            socket.create_connection(("127.0.0.1", network.ports[2][1]), 30) as made_by_two,
        ):
            assert (ask(made_by_one, b"a"), ask(made_by_two, b"b")) == (b"a", b"b")
            network.cut([1], [2], one_way=True)
            for connection in (made_by_one, made_by_two):  # of the first the request is held, of the second the answer
                connection.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    ask(connection, b"c")
                connection.settimeout(30)
            with socket.create_connection(("127.0.0.1", network.ports[2][1]), 30) as late:
                late.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    ask(late, b"d")
                network.heal()
                late.settimeout(30)
                assert late.recv(100) == b"d"
            assert (made_by_one.recv(100), made_by_two.recv(100)) == (b"c", b"c")
    finally:
        network.close()


def test_what_the_other_side_sends_passes_a_one_way_cut() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    network = Network([1, 2], {2: listener.getsockname()[1]})
    try:
        with socket.create_connection(("127.0.0.1", network.ports[1][2]), 30) as one:
            one.sendall(b"hello")
            two, _ = listener.accept()
            with two:
                two.settimeout(30)
                assert two.recv(100) == b"hello"
                network.cut([1], [2], one_way=True)
                two.sendall(b"answer")
                assert one.recv(100) == b"answer"
                one.sendall(b"more")
                two.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    two.recv(100)
                network.heal()
                two.settimeout(30)
                assert two.recv(100) == b"more"
    finally:
        network.close()
        listener.close()


def test_cuts_add_up_and_leave_a_bridge(echo: int) -> None:
    network = Network([1, 2, 3], {1: echo, 2: echo, 3: echo})
    try:
        network.cut([1], [2])
        network.cut([2], [1], one_way=True)
        for source, target in ((1, 3), (3, 1), (2, 3), (3, 2)):
            with socket.create_connection(("127.0.0.1", network.ports[source][target]), 30) as connection:
                connection.settimeout(30)
                assert ask(connection, b"a") == b"a"
        for source, target in ((1, 2), (2, 1)):
            with socket.create_connection(("127.0.0.1", network.ports[source][target]), 30) as connection:
                connection.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    ask(connection, b"a")
    finally:
        network.close()


def test_a_target_that_is_down_closes_the_connection() -> None:
    network = Network([1], {2: 1})
    try:
        with socket.create_connection(("127.0.0.1", network.ports[1][2]), 30) as connection:
            assert connection.recv(1) == b""
    finally:
        network.close()
