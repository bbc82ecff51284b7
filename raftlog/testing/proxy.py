"""Cuts connections between nodes: one proxy on loopback for each ordered pair of nodes.

A cut looks like a broken network: connections stay open and nothing arrives. After the cut, the held bytes are
delivered late. A cut in one direction holds everything that one node sends, on connections that it made or accepted.
A connection that is opened meanwhile is established only when both directions are open, as a handshake needs both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Final

_CHUNK_BYTES: Final = 64 << 10


class _Link:
    """The connections that a source makes to a target: a listening port, and a gate for each direction."""

    def __init__(self, target_port: int, there: asyncio.Event, back: asyncio.Event) -> None:
        self.port = 0
        self._target_port = target_port
        self._there = there
        self._back = back
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio serves a connection in a task"
        self._connections.add(task)
        try:
            while not (self._there.is_set() and self._back.is_set()):
                await self._there.wait()
                await self._back.wait()
            try:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            except OSError:
                return
            try:
                ways = (self._pump(reader, far_writer, self._there), self._pump(far_reader, writer, self._back))
                pumps = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                far_writer.close()
        except asyncio.CancelledError:
            pass  # from `close`, which gathers the tasks
        finally:
            writer.close()
            self._connections.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await gate.wait()
            writer.write(data)
            await writer.drain()


class Network:
    """Proxies for all pairs, on one thread. `source` reaches `target` at `ports[source][target]`."""

    def __init__(self, sources: Iterable[int], target_ports: dict[int, int]) -> None:
        self.ports: dict[int, dict[int, int]] = {}
        self._links: dict[tuple[int, int], _Link] = {}
        self._gates: dict[tuple[int, int], asyncio.Event] = {}
        """By (sender, receiver): the gate for these bytes, on connections from either node."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="raftlog-test-network", daemon=True)
        self._thread.start()
        try:
            self._run(self._listen(list(sources), target_ports))
        except BaseException:
            self.close()
            raise

    async def _listen(self, sources: list[int], target_ports: dict[int, int]) -> None:
        for source in sources:
            self.ports[source] = {}
            for target, port in target_ports.items():
                if source == target:
                    self.ports[source][target] = port
                    continue
                link = _Link(port, self._gate(source, target), self._gate(target, source))
                self._links[source, target] = link
                await link.listen(0)
                self.ports[source][target] = link.port

    def _gate(self, sender: int, receiver: int) -> asyncio.Event:
        gate = self._gates.get((sender, receiver))
        if gate is None:
            gate = self._gates[sender, receiver] = asyncio.Event()
            gate.set()
        return gate

    def cut(self, some: Iterable[int], others: Iterable[int], *, one_way: bool = False) -> None:
        """Hold everything between the nodes of one side and the nodes of the other.

        With `one_way`, hold only what `some` send to `others`.
        """
        pairs = {(a, b) for a in some for b in others}
        if not one_way:
            pairs |= {(b, a) for a, b in pairs}
        self._run(self._set(pairs, is_open=False))

    def heal(self) -> None:
        """Open all gates."""
        self._run(self._set(set(self._gates), is_open=True))

    async def _set(self, pairs: set[tuple[int, int]], *, is_open: bool) -> None:
        for pair in pairs & self._gates.keys():
            gate = self._gates[pair]
            (gate.set if is_open else gate.clear)()

    def close(self) -> None:
        """End every connection."""

        async def close() -> None:
            await asyncio.gather(*(link.close() for link in self._links.values()))

        if self._loop.is_closed():
            return
        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: object) -> None:
        running: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type] # a coroutine
        running.result(timeout=30)
