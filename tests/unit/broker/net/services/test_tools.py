"""gRPC's own services on a real server: health follows the broker, reflection shows the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from broker.net.services import tools
from broker.net.services.metadata import MetadataService
from broker.net.services.tools import Tools
from broker.security.permissions import RULES, TOOLS
from raftlog._client.connections import refusal_of
from raftlog.errors import BrokerOverloaded, InvalidRequestError
from raftlog.v1 import metadata_pb2
from tests.support.memory_metadata import MemoryMetadata

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Broker:
    """A broker that is ready, or not."""

    ready = True


@asynccontextmanager
async def served(broker: Broker, **keys: bool) -> AsyncIterator[aio.Channel]:
    server = aio.server()
    Tools(lambda: broker.ready, **keys).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


def test_health_is_that_of_the_broker() -> None:
    async def test() -> None:
        broker = Broker()
        async with served(broker, health=True, reflection=False) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for service in ("", "raftlog.v1.Log"):
                assert (await check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
            listed = (await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())).statuses
            assert {*listed} == {"", *(method.split("/")[1] for method in RULES)}
            assert {each.status for each in listed.values()} == {SERVING}
            broker.ready = False
            assert (await check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            with pytest.raises(aio.AioRpcError) as caught:
                await check(health_pb2.HealthCheckRequest(service="raftlog.v1.Raft"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert isinstance(refusal_of(caught.value.trailing_metadata()), InvalidRequestError)

    run(test)


def test_a_watch_sends_changes_and_watches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(tools, "MAX_WATCHERS", 2)

    async def test() -> None:
        broker = Broker()
        async with served(broker, health=True, reflection=False) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            first, other = watch(health_pb2.HealthCheckRequest()), watch(health_pb2.HealthCheckRequest(service="x"))
            assert (await first.read()).status == SERVING
            assert (await other.read()).status == UNKNOWN
            broker.ready = False
            assert (await first.read()).status == NOT_SERVING
            third = watch(health_pb2.HealthCheckRequest())
            assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert isinstance(refusal_of(await third.trailing_metadata()), BrokerOverloaded)
            other.cancel()
            while True:  # there is room again as soon as the server has noticed
                again = watch(health_pb2.HealthCheckRequest())
                if (answer := await again.read()) is not aio.EOF:
                    assert answer.status == NOT_SERVING
                    break

    run(test)


def test_reflection_shows_the_contract() -> None:
    async def test() -> None:
        async with served(Broker(), health=True, reflection=True) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = [each.name for each in (await call.read()).list_services_response.service]
            assert names == sorted({method.split("/")[1] for method in (*RULES, *TOOLS)})
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="raftlog.v1.Log"))
            (raw,) = (await call.read()).file_descriptor_response.file_descriptor_proto[:1]
            assert FileDescriptorProto.FromString(raw).name == "raftlog/v1/log.proto"
            call.cancel()

    run(test)


def test_without_their_keys_there_are_neither() -> None:
    async def test() -> None:
        async with served(Broker(), health=False, reflection=False) as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test)


def test_api_versions_lists_what_is_served() -> None:
    def methods(**keys: bool) -> list[str]:
        return Tools(lambda: True, **keys).methods()

    assert methods(health=False, reflection=False) == list(RULES)
    assert {*methods(health=True, reflection=True)} == {*RULES, *TOOLS}

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

    async def ask() -> metadata_pb2.ApiVersionsResponse:
        service: Any = MetadataService(
            MemoryMetadata(),
            sasl_mechanisms=("SCRAM-SHA-256",),
            methods=lambda: methods(health=True, reflection=False),
        )
        answer: metadata_pb2.ApiVersionsResponse = await service.ApiVersions(
            metadata_pb2.ApiVersionsRequest(client_software_name="a client"), Context()
        )
        return answer

    answer = asyncio.run(ask())
    assert "/raftlog.v1.Metadata/ApiVersions" in answer.methods
    assert "/grpc.health.v1.Health/Check" in answer.methods
    assert list(answer.methods) == sorted(answer.methods)
    assert list(answer.record_formats) == [1]
    assert list(answer.sasl_mechanisms) == ["SCRAM-SHA-256"]
    assert answer.finalized_features["metadata.version"] >= 1
    assert [each.name for each in answer.supported_features] == ["metadata.version"]
