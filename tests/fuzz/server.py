"""A whole node in this process, with both of its listeners, on loopback, for the targets that test handlers."""

from __future__ import annotations

import asyncio
import atexit
import logging
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from broker.config.config import BrokerConfig
from broker.server.server import NodeServer
from raftlog.testing.layout import free_ports
from raftlog.v1 import admin_pb2, common_pb2, metadata_pb2

T = TypeVar("T")
TOPIC: Final = "t"
OTHER_TOPIC: Final = "u"
START_S: Final = 180.0
MOST_TOPICS: Final = 12
ANSWER_S: Final = 60.0
"""Longer than any handler may take, on a machine that is busy with other things."""
MOST_ATTEMPTS: Final = 5
"""To make a topic: the time of a request may be over although the node is well."""
_OPTIONS: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Complaints(logging.Handler):
    """Keeps what is logged with a traceback: nothing that a client says may cause that."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if record.exc_info and record.exc_info[0] is not None:  # False: asyncio, of what has no error
            text = f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}"
            trace = logging.Formatter().formatException(record.exc_info)
            self.told.append(f"{text}\n{trace}")

    def take(self) -> list[str]:
        """Return what there is, and forget it."""
        told, self.told = self.told, []
        return told


class Node:
    """Started at the first use, and again when it has stopped; gone with the process."""

    def __init__(self) -> None:
        self.complaints = Complaints()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fuzzed node", daemon=True)
        self._thread.start()
        self._server: NodeServer | None = None
        self._directory: str | None = None
        self.failure: BaseException | None = None
        logging.getLogger().addHandler(self.complaints)
        self._start()
        atexit.register(lambda: shutil.rmtree(self._directory or "", ignore_errors=True))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="raftlog-fuzz-")
        (port,) = free_ports(1)
        config = BrokerConfig.from_values(
            {
                "node.id": 1,
                "cluster.id": "fuzz",
                "listeners": "127.0.0.1:0,kafka://127.0.0.1:0",
                "controller.quorum.voters": f"1@127.0.0.1:{port}",
                "log.dirs": str(Path(self._directory) / "data"),
                "metadata.log.dir": str(Path(self._directory) / "metadata"),
                "offsets.topic.num.partitions": 2,
                "offsets.topic.replication.factor": 1,
                "transaction.state.log.num.partitions": 2,
                "transaction.state.log.replication.factor": 1,
                "transaction.state.log.min.isr": 1,
                "max.partitions.per.topic": 8,
                "max.partitions.per.broker": 60,
                "max.streams": 50,
                "request.timeout.ms": 2_000,
                "broker.lease.ms": 50_000,
                "broker.session.timeout.ms": 60_000,
                "log.cleaner.enable": "false",
            }
        )
        self.failure = None
        self._server = NodeServer(config)
        self._do(self._server.start())
        asyncio.run_coroutine_threadsafe(self._watch(self._server), self._loop)
        self.clients = grpc.insecure_channel(self._server.bootstrap, options=_OPTIONS)
        self.nodes = grpc.insecure_channel(self._server.inter_node, options=_OPTIONS)
        self.topic_ids: dict[str, bytes] = {}
        self.set_up()
        self.complaints.take()

    async def _watch(self, server: NodeServer) -> None:
        try:
            await server.failed()
        except BaseException as error:  # any end of a node, reported later
            if self._server is server:
                self.failure = error

    def stop(self) -> None:
        """End it, and remove its files."""
        server, self._server = self._server, None
        if server is None:
            return
        self.clients.close()
        self.nodes.close()
        self._do(server.stop())
        shutil.rmtree(self._directory or "", ignore_errors=True)

    def restart(self) -> None:
        """Begin anew with an empty node."""
        self.stop()
        self._start()

    @property
    def kafka_address(self) -> tuple[str, int]:
        """Where it listens for Kafka clients."""
        assert self._server is not None, "the address of the node is asked for, but the node is not running"
        host, port = self._server.kafka.rsplit(":", 1)
        return host, int(port)

    # What every input finds

    def call(self, method: str, request: Any, response: Any) -> Any:
        """Call a method as a good client does."""
        call = self.clients.unary_unary(
            f"/raftlog.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return call(request, timeout=ANSWER_S, wait_for_ready=True)

    def set_up(self) -> None:
        """Have the two topics there, and not many others. A good client's requests succeed after any input."""
        found = self.call("Metadata/Get", metadata_pb2.MetadataRequest(all_topics=True), metadata_pb2.MetadataResponse)
        names = {topic.name: topic.topic_id for topic in found.topics}
        for name in list(names):
            if len(names) > MOST_TOPICS and name not in (TOPIC, OTHER_TOPIC) and not name.startswith("__"):
                deletion = admin_pb2.DeleteTopicRequest(name=name)
                self.call("Admin/DeleteTopic", deletion, admin_pb2.DeleteTopicResponse)
                del names[name]
        for name in (TOPIC, OTHER_TOPIC):
            if name not in names:
                back = admin_pb2.AdminAlterBrokerRequest(broker_id=1, cordoned=False, drained=False)
                self.call("Admin/AlterBroker", back, admin_pb2.AdminAlterBrokerResponse)
                request = admin_pb2.CreateTopicRequest(name=name, partitions=2, replication_factor=1)
                made = self.call("Admin/CreateTopic", request, admin_pb2.CreateTopicResponse)
                for _ in range(MOST_ATTEMPTS):
                    if made.error.code != common_pb2.REQUEST_TIMED_OUT:
                        break
                    made = self.call("Admin/CreateTopic", request, admin_pb2.CreateTopicResponse)
                assert made.error.code in (common_pb2.NONE, common_pb2.TOPIC_ALREADY_EXISTS), made.error.message
                found = self.call(
                    "Metadata/Get", metadata_pb2.MetadataRequest(topics=[name]), metadata_pb2.MetadataResponse
                )
                names[name] = found.topics[0].topic_id
        self.topic_ids = {name: names[name] for name in (TOPIC, OTHER_TOPIC)}


def stop() -> None:
    """Stop the node, if there is one, before the process ends, because no thread can be started then."""
    while _node:
        _node.pop().stop()


_node: list[Node] = []


def node() -> Node:
    """Return the node of this process."""
    if not _node:
        _node.append(Node())
    return _node[0]
