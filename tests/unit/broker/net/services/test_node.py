"""How a node describes itself, and which callers may ask it about others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import aio

from broker.config.config import BrokerConfig
from broker.net.services import node as node_module
from broker.net.services.node import NodeFacts, NodeService, node_address, pass_on_to
from broker.observability.event_loop import LoopLagMonitor
from broker.observability.health import Health
from broker.security.caller import caller
from raftlog import __version__
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog._core.words import HIDDEN
from raftlog.errors import (
    BrokerOverloaded,
    InternalError,
    InvalidRequestError,
    RequestTimedOut,
    StorageError,
    UnsupportedVersion,
    from_wire,
)
from raftlog.v1 import node_pb2, node_pb2_grpc
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage
from raftmeta.quorum.description import RaftView
from tests.support.admin_service import FakeLog, FakeLogs, FixedClock
from tests.support.fake_authorizer import FakeAuthorizer, Permission

QUORUM = {"controller.quorum.voters": ["1@127.0.0.1:9093"]}


class Voter:
    """A controller that leads."""

    def raft_view(self) -> RaftView:
        """Return its view of the log."""
        return RaftView("leader", 3, 1, 90, 89, 91, 50, {2: 1})


class Tls:
    """A certificate."""

    expires_ms = 77


def facts_of(directory: Path, **values: Any) -> NodeFacts:
    directory.mkdir(exist_ok=True)
    raw = {"node.id": 1, "log.dirs": [str(directory)], "cluster.id": "c", **values}
    clock = FixedClock()
    lag = LoopLagMonitor(clock)
    for lag_ms in (1.0, 30.0, 300.0, 1.0):
        lag.note(lag_ms)
    return NodeFacts(BrokerConfig.from_values(raw), clock, lag, Health(clock, 10_000))


def describe(facts: NodeFacts) -> node_pb2.NodeInfo:
    return asyncio.run(facts.describe())


def test_a_node_tells_who_it_is_and_how_it_is(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    facts.image = lambda: MetadataImage(offset=7, cluster_id="cluster", controller_id=2, controller_epoch=4)
    facts.voter, facts.tls = Voter(), Tls()
    facts.client_listener = "h:9092"
    info = describe(facts)
    assert (info.node_id, info.cluster_id, info.version, list(info.roles)) == (
        1,
        "cluster",
        __version__,
        ["broker", "controller"],
    )
    assert (info.wall_clock_ms, info.uptime_ms, info.client_listener) == (1_000_000, 0, "h:9092")
    assert (info.metadata_offset, info.controller_id, info.controller_epoch) == (7, 2, 4)
    assert (info.voter.role, info.voter.term, info.voter.applied_index, info.voter.last_index) == ("leader", 3, 89, 91)
    assert info.certificate_expires_ms == 77
    assert info.not_ready == "the node is starting"
    assert (info.loop_lag.measurements, info.loop_lag.largest_ms) == (4, 300.0)
    assert (info.loop_lag.share_above_10_ms, info.loop_lag.share_above_100_ms) == (0.5, 0.25)
    assert info.open_files.used > 2
    assert info.pid > 0
    assert info.hostname
    assert [each.name for each in info.features] == ["metadata.version"]


def test_before_the_metadata_is_known_it_tells_what_its_file_says(tmp_path: Path) -> None:
    info = describe(facts_of(tmp_path))
    assert info.cluster_id == "c"
    assert info.controller_id == -1
    assert not info.HasField("voter")


def test_directories_with_what_lies_in_them_and_why_one_does_not_work(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    facts = facts_of(good, **{"log.dirs": [str(good), str(bad)], "metadata.log.dir": str(tmp_path)})
    logs = [FakeLog(str(good / f"t-{number}"), "t", number) for number in range(501)]
    facts.logs = FakeLogs([*logs, FakeLog(str(bad / "t-9"), "t", 9)], {str(bad): "it burnt"})
    first, second, metadata = describe(facts).log_dirs
    assert (first.path, first.metadata, first.partitions, first.log_bytes) == (str(good), False, 501, 50_100)
    assert first.total_bytes >= first.usable_bytes > 0
    assert not first.error.code
    assert isinstance(from_wire(second.error), StorageError)
    assert "it burnt" in second.error.message
    assert (second.partitions, second.total_bytes) == (1, 0)
    assert (metadata.path, metadata.metadata, metadata.partitions) == (str(tmp_path), True, 0)


def test_a_directory_that_is_gone_is_told_and_a_controller_alone_has_no_others(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    facts = facts_of(tmp_path, **{"process.roles": ["controller"], "metadata.log.dir": gone, **QUORUM})
    [metadata] = describe(facts).log_dirs
    assert (metadata.path, metadata.metadata) == (gone, True)
    assert "No such file" in metadata.error.message


def test_settings_are_told_without_secrets_and_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ConfigEntry(key="ssl.key.password", value="hunter2", documentation="long")
    plain = ConfigEntry(key="node.id", value="1", source=ConfigEntry.STATIC_BROKER, documentation="long")
    monkeypatch.setattr(node_module, "describe_broker", lambda image, config: iter([secret, plain]))
    first, second = describe(facts_of(tmp_path)).configs
    assert (first.key, first.value, first.documentation) == ("ssl.key.password", HIDDEN, "")
    assert (second.key, second.value, second.source) == ("node.id", "1", ConfigEntry.STATIC_BROKER)


# Asking for another node


def ask(service: NodeService, node_id: int | None = None) -> node_pb2.DescribeNodeResponse:
    """Return the service's answer over a connection."""

    async def call() -> node_pb2.DescribeNodeResponse:
        server = aio.server()
        server.add_generic_rpc_handlers((service.handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: node_pb2_grpc.NodeAsyncStub = node_pb2_grpc.NodeStub(channel)
            response = await stub.DescribeNode(node_pb2.DescribeNodeRequest(node_id=node_id), timeout=60)
        await server.stop(None)
        return response

    return asyncio.run(call())


def test_who_is_asked_answers_for_itself_by_name_or_without_one(tmp_path: Path) -> None:
    service = NodeService(facts_of(tmp_path))
    assert ask(service).node.node_id == 1
    assert ask(service, 1).node.node_id == 1
    refused = ask(service, 0)  # a node may have that number
    assert isinstance(from_wire(refused.error), InvalidRequestError)
    assert "this is node 1, it cannot describe node 0" in refused.error.message


def test_a_question_for_another_node_is_passed_on(tmp_path: Path) -> None:
    async def pass_on(node_id: int) -> node_pb2.DescribeNodeResponse:
        if node_id == 3:
            raise RequestTimedOut("frozen")
        return node_pb2.DescribeNodeResponse(node=node_pb2.NodeInfo(node_id=node_id))

    service = NodeService(facts_of(tmp_path), pass_on)
    assert ask(service, 2).node.node_id == 2
    assert isinstance(from_wire(ask(service, 3).error), RequestTimedOut)
    assert ask(service, 1).node.version == __version__, "a question to the node itself must not be passed on"


def test_a_bug_is_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = facts_of(tmp_path)

    def broken() -> MetadataImage:
        raise ZeroDivisionError("oh")

    facts.image = broken
    assert isinstance(from_wire(ask(NodeService(facts)).error), InternalError)
    assert "a node could not be described" in caplog.text


def test_another_node_is_asked_at_its_inter_node_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "PASSED_ON_S", 60.0)

    async def scenario() -> None:
        server = aio.server()
        server.add_generic_rpc_handlers((NodeService(facts_of(tmp_path)).handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        other = aio.server()  # of a version without this service
        other_port = other.add_insecure_port("127.0.0.1:0")
        await server.start()
        await other.start()
        addresses = {1: f"127.0.0.1:{port}", 2: f"127.0.0.1:{other_port}", 3: "127.0.0.1:1"}
        passed_on = pass_on_to(addresses.get)
        assert (await passed_on(1)).node.node_id == 1
        with pytest.raises(UnsupportedVersion):
            await passed_on(2)
        with pytest.raises(
            RequestTimedOut, match=r"node 3 does not answer other nodes: no connection to 127\.0\.0\.1:1"
        ):
            await passed_on(3)
        with pytest.raises(InvalidRequestError, match="node 4 is not in this cluster"):
            await passed_on(4)
        await asyncio.gather(server.stop(None), other.stop(None))

    asyncio.run(scenario())


async def test_only_so_many_questions_are_passed_on_at_a_time() -> None:
    server = aio.server()  # never started: the port is open, and no answer comes
    port = server.add_insecure_port("127.0.0.1:0")
    passed_on = pass_on_to(lambda node_id: f"127.0.0.1:{port}")
    waiting = [asyncio.ensure_future(passed_on(2)) for _ in range(node_module.MOST_PASSED_ON)]
    await asyncio.sleep(0)
    with pytest.raises(BrokerOverloaded, match="try again later"):
        await passed_on(2)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(RequestTimedOut):  # there is room again; still no answer
        await asyncio.wait_for(passed_on(2), 60)
    await server.stop(None)


def test_a_broker_is_where_it_says_and_a_controller_where_the_voters_are_listed() -> None:
    voters = {1: ("c1", 9093), 2: ("::1", 9093)}
    brokers = {1: "b1:19093", 5: "b5:9093"}
    assert node_address(voters, brokers.get, 1) == "b1:19093"
    assert node_address(voters, brokers.get, 2) == "[::1]:9093"
    assert node_address(voters, brokers.get, 5) == "b5:9093"
    assert node_address(voters, brokers.get, 6) is None


def test_the_service_is_named_as_in_the_contract() -> None:
    [service] = node_pb2.DESCRIPTOR.services_by_name.values()
    assert (service.full_name, [method.name for method in service.methods]) == (
        node_module.SERVICE,
        [node_module.METHOD],
    )


def test_configs_are_told_to_those_who_may_describe_configs(tmp_path: Path) -> None:
    service, context = NodeService(facts_of(tmp_path / "logs")), cast(Any, None)

    async def configs_for(*allowed: Permission) -> int:
        caller.set(FakeAuthorizer(*allowed).caller())
        response = await service.DescribeNode(node_pb2.DescribeNodeRequest(), context)
        assert response.node.version == __version__
        return len(response.node.configs)

    async def main() -> None:
        assert await configs_for((Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME)) == 0
        assert await configs_for((Acl.DESCRIBE_CONFIGS, Acl.CLUSTER, CLUSTER_NAME)) > 50

    asyncio.run(main())
