"""A name server on the loopback, whose answer a test changes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

_HOST_ADDRESS = 1
_THE_NAME = 0xC00C
"""Points at the name in the question, the way names are compressed."""
_NO_ERROR, _NO_SUCH_NAME = 0x8180, 0x8183


class NameServer:
    """Answers every question for an IPv4 address with `address`; while that is None, no name exists."""

    def __init__(self, listener: socket.socket) -> None:
        self.address: str | None = None
        self._listener = listener

    def target(self, port: int) -> str:
        """Return the target with which gRPC asks this server for a name, as `port` of that host."""
        host, own_port = self._listener.getsockname()
        return f"dns://{host}:{own_port}/node.test:{port}"

    def serve(self) -> None:
        """Answer until an empty message arrives."""
        while True:
            question, client = self._listener.recvfrom(4096)
            if not question:
                return
            self._listener.sendto(self._answer(question), client)

    def _answer(self, question: bytes) -> bytes:
        end = question.index(b"\0", 12) + 5
        (kind,) = struct.unpack_from("!H", question, end - 4)
        address = self.address
        flags = _NO_SUCH_NAME if address is None else _NO_ERROR
        record = b""
        if address is not None and kind == _HOST_ADDRESS:
            record = struct.pack("!HHHIH", _THE_NAME, kind, 1, 0, 4) + socket.inet_aton(address)
        return question[:2] + struct.pack("!5H", flags, 1, bool(record), 0, 0) + question[12:end] + record


@contextlib.contextmanager
def name_server() -> Iterator[NameServer]:
    """Run a name server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        server = NameServer(listener)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.sendto(b"", listener.getsockname())
            thread.join()
