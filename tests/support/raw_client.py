"""A client without the SDK: it sends requests as another implementation, or a malicious one, could."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from raftlog.format import wire
from raftlog.v1 import log_pb2, metadata_pb2, metadata_pb2_grpc

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
TIMEOUT_S = 60.0


class RawClient:
    """One connection; a produce stream that lives until the context ends."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self._call: Any = None
        self._sent = 0
        self._chain = 0

    async def topic_id(self, topic: str) -> bytes:
        """Return the id of a topic."""
        stub = metadata_pb2_grpc.MetadataStub(self.channel)
        response = await stub.Get(metadata_pb2.MetadataRequest(topics=[topic]), timeout=TIMEOUT_S)
        assert not response.topics[0].HasField("error"), response.topics[0].error.message
        return response.topics[0].topic_id

    async def metadata(self, request: metadata_pb2.MetadataRequest) -> metadata_pb2.MetadataResponse:
        """Return the broker's metadata of the cluster."""
        stub = metadata_pb2_grpc.MetadataStub(self.channel)
        response: metadata_pb2.MetadataResponse = await stub.Get(request, timeout=TIMEOUT_S)
        return response

    @staticmethod
    async def read_frames(call: Any) -> list[wire.Frame]:
        """Return the frames of the next message of a fetch stream."""
        frames: list[wire.Frame] = await asyncio.wait_for(call.read(), TIMEOUT_S)
        assert isinstance(frames, list), await call.details()
        return frames

    def produce_call(self) -> Any:
        """Return a new produce stream."""
        return self.channel.stream_stream(
            "/raftlog.v1.Log/Produce",
            request_serializer=wire.encode_produce,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )()

    def fetch_call(self) -> Any:
        """Return a new fetch stream."""
        return self.channel.stream_stream(
            "/raftlog.v1.Log/Fetch",
            request_serializer=log_pb2.FetchRequest.SerializeToString,
            response_deserializer=wire.decode_fetch,
        )()

    async def produce(
        self,
        topic_id: bytes,
        batch: bytes,
        *,
        partition: int = 0,
        leader_epoch: int = -1,
        acks: int = log_pb2.ALL,
        transactional_id: str = "",
        sink_id: str = "",
    ) -> log_pb2.ProduceResult:
        """Send one batch on the shared stream, in a new chain, and return the broker's result."""
        if self._call is None:
            self._call = self.produce_call()
        self._sent += 1
        self._chain += 1
        request = self.request(self._sent, [(topic_id, partition, leader_epoch, self._chain, batch)], acks)
        request.head.transactional_id, request.head.sink_id = transactional_id, sink_id
        await self._call.write(request)
        response = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
        assert isinstance(response, log_pb2.ProduceResponse), await self._call.details()
        assert response.correlation_id == self._sent, (
            f"the answer with correlation id {response.correlation_id} is not to the last request, {self._sent}"
        )
        result: log_pb2.ProduceResult = response.results[0]
        return result

    @staticmethod
    def request(
        correlation_id: int, parts: Sequence[tuple[bytes, int, int, int, bytes]], acks: int = log_pb2.ALL
    ) -> wire.Produce:
        """Return a request of (topic id, partition, leader epoch, chain, batch) parts."""
        return wire.Produce(
            log_pb2.ProduceRequest(correlation_id=correlation_id, acks=acks, timeout_ms=10_000),  # type: ignore[arg-type] # an int of the enum
            [
                wire.ProducePart(
                    log_pb2.ProducePartition(topic_id=topic, partition=number, leader_epoch=epoch, chain=chain), batch
                )
                for topic, number, epoch, chain, batch in parts
            ],
        )

    async def close(self) -> None:
        """End the produce stream."""
        if self._call is not None:
            self._call.cancel()


@asynccontextmanager
async def raw_client(bootstrap: str) -> AsyncIterator[RawClient]:
    """Connect to a broker."""
    async with aio.insecure_channel(bootstrap, options=OPTIONS) as channel:
        client = RawClient(channel)
        try:
            yield client
        finally:
            await client.close()
