"""The look-up of coordinators: remembered, forgotten, shared, and never stuck at a broker that is silent or misled."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from raftlog._client import coordinators as coordinators_module
from raftlog._client.connections import Connections
from raftlog._client.coordinators import Coordinator, Coordinators
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import AdminOptions
from raftlog.errors import (
    BrokerUnavailable,
    CoordinatorNotAvailable,
    InvalidGroupId,
    NotCoordinator,
    RequestTimedOut,
    StaleMemberEpoch,
)
from raftlog.v1 import group_pb2
from tests.support.fake_broker import FakeCluster

LONG_S = 120.0
SOON_S = 40.0
"""Far below `LONG_S`, and far above what anything takes here."""
FETCH = group_pb2.FetchOffsetsRequest(group_id="g", member_epoch=-1, all=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is only slow is not given up, and no other one is asked beside it."""
    monkeypatch.setattr(coordinators_module, "_ROUND_S", LONG_S)
    monkeypatch.setattr(coordinators_module, "_HEDGE_S", LONG_S)
    monkeypatch.setattr(coordinators_module, "_PATIENCE_S", LONG_S)


@pytest.fixture
def hedged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next broker is asked while one is silent; while the coordinator is silent, it is looked up again."""
    monkeypatch.setattr(coordinators_module, "_HEDGE_S", 0.2)
    monkeypatch.setattr(coordinators_module, "_PATIENCE_S", 0.5)


@asynccontextmanager
async def looking(bootstrap: str) -> AsyncIterator[Coordinators]:
    options = AdminOptions.make(
        None, {"retry_backoff_ms": 5, "reconnect_backoff_ms": 5, "request_timeout_ms": int(LONG_S * 1000)}
    )
    connections = Connections()
    metadata = MetadataCache(
        connections, bootstrap.split(","), max_age_ms=60_000, request_timeout_ms=LONG_S * 1000, pauses=options.pauses
    )
    coordinators = Coordinators(metadata, connections, options)
    try:
        yield coordinators
    finally:
        await coordinators.close()
        await metadata.close()
        await connections.close()


def run(cluster: FakeCluster, work: Callable[[Coordinators], Awaitable[Any]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), looking(cluster.bootstrap) as coordinators:
            await work(coordinators)

    asyncio.run(main())


def test_a_coordinator_is_remembered_until_it_is_forgotten() -> None:
    with FakeCluster(nodes=3) as cluster:
        cluster.groups.add("g", 2)

        async def work(coordinators: Coordinators) -> None:
            found = await coordinators.find("g", 30)
            assert (found.node_id, found.partition) == (2, 7)
            assert found.address == f"127.0.0.1:{cluster.ports[2]}"
            cluster.groups.move("g", 3)
            assert await coordinators.find("g", 30) == found
            assert coordinators.known("g") == found
            assert cluster.groups.found == 1
            coordinators.forget("g", found._replace(node_id=1))
            assert coordinators.known("g") == found, (
                "the coordinator must stay known, as the one to forget is another one"
            )
            coordinators.forget("g", found)
            assert (await coordinators.find("g", 30)).node_id == 3

        run(cluster, work)


def test_who_asks_at_the_same_time_shares_the_answer() -> None:
    with FakeCluster(nodes=1) as cluster:

        async def work(coordinators: Coordinators) -> None:
            found = await asyncio.gather(*(coordinators.find("g", 30) for _ in range(50)))
            assert len(set(found)) == 1
            assert cluster.groups.found == 1

        run(cluster, work)


def test_one_of_those_who_share_may_be_cancelled() -> None:
    with FakeCluster(nodes=1) as cluster:

        async def work(coordinators: Coordinators) -> None:
            first = asyncio.ensure_future(coordinators.find("g", 30))
            second = asyncio.ensure_future(coordinators.find("g", 30))
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).node_id == 1

        run(cluster, work)


@pytest.mark.usefixtures("hedged")
def test_who_fails_in_the_moment_of_the_first_answer_is_heard_as_well() -> None:
    """Else the event loop complains of an exception that was never retrieved."""
    complaints: list[dict[str, Any]] = []

    async def work(coordinators: Coordinators) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        begun: list[str] = []
        everybody = asyncio.Event()

        async def ask(address: str, group_id: str) -> Coordinator:
            begun.append(address)
            if len(begun) == 3:
                everybody.set()
            await everybody.wait()
            if address != begun[-1]:
                raise BrokerUnavailable(f"no connection to {address}")
            return Coordinator(1, address, 0)

        coordinators._ask_one = ask  # type: ignore[method-assign] # all at once, which the network does seldom
        for number in range(5):
            begun.clear()
            everybody.clear()
            assert (await coordinators.find(f"g-{number}", 30)).address == begun[-1]
        gc.collect()

    with FakeCluster(nodes=3) as cluster:
        run(cluster, work)
    assert not complaints


@pytest.mark.usefixtures("hedged")
def test_a_frozen_broker_holds_nobody_up() -> None:
    with FakeCluster(nodes=2) as cluster:
        cluster.groups.add("g", 2)
        cluster.freeze(1)
        try:

            async def work(coordinators: Coordinators) -> None:
                started = time.monotonic()
                assert (await coordinators.find("g", 30)).node_id == 2
                assert time.monotonic() - started < SOON_S

            run(cluster, work)
        finally:
            cluster.thaw(1)


def test_a_broker_that_knows_of_no_coordinator_is_not_the_last_word() -> None:
    with FakeCluster(nodes=2) as cluster:
        cluster.groups.add("g", 2)
        cluster.groups.misled[1] = -1

        async def work(coordinators: Coordinators) -> None:
            for _ in range(5):
                coordinators.forget("g")
                assert (await coordinators.find_once("g")).node_id == 2

        run(cluster, work)


def test_a_coordinator_that_comes_up_is_waited_for() -> None:
    with FakeCluster(nodes=1) as cluster:
        cluster.groups.unavailable["g"] = CoordinatorNotAvailable("__consumer_offsets is being created")

        async def work(coordinators: Coordinators) -> None:
            with pytest.raises(CoordinatorNotAvailable, match="being created"):
                await coordinators.find("g", 0.1)
            waiting = asyncio.ensure_future(coordinators.find("g", 60))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            cluster.groups.unavailable.clear()
            assert (await waiting).node_id == 1

        run(cluster, work)


def test_a_name_that_is_refused_is_not_asked_for_again() -> None:
    with FakeCluster(nodes=3) as cluster:
        cluster.groups.unavailable["g"] = InvalidGroupId("not that name")

        async def work(coordinators: Coordinators) -> None:
            with pytest.raises(InvalidGroupId):
                await coordinators.find("g", 30)
            assert cluster.groups.found == 1

        run(cluster, work)


def test_where_nobody_listens_the_addresses_are_named() -> None:
    async def main(port: int) -> None:
        async with looking(f"127.0.0.1:{port}") as coordinators:
            with pytest.raises(BrokerUnavailable, match=f"no broker answers at 127.0.0.1:{port}"):
                await coordinators.find("g", 0.3)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that no other process listens there
        asyncio.run(main(taken.getsockname()[1]))


def test_a_call_goes_to_the_coordinator_and_forgets_one_that_is_none() -> None:
    with FakeCluster(nodes=3) as cluster:
        cluster.groups.add("g", 2)

        async def work(coordinators: Coordinators) -> None:
            await coordinators.call("g", "FetchOffsets", FETCH, 30)
            cluster.groups.move("g", 3)
            with pytest.raises(NotCoordinator, match="coordinated by 3"):
                await coordinators.call("g", "FetchOffsets", FETCH, 30)
            await coordinators.call("g", "FetchOffsets", FETCH, 30)
            assert [node for node, _ in cluster.groups.calls] == [2, 2, 3]
            cluster.groups.refuse.append(StaleMemberEpoch("too old"))
            with pytest.raises(StaleMemberEpoch):
                await coordinators.call("g", "FetchOffsets", FETCH, 30)
            assert coordinators.known("g") is not None, (
                "the coordinator must stay known, as the refusal does not say that it moved"
            )

        run(cluster, work)


def test_a_dead_coordinator_is_forgotten() -> None:
    with FakeCluster(nodes=2) as cluster:
        cluster.groups.add("g", 2)

        async def work(coordinators: Coordinators) -> None:
            coordinators._metadata.bootstrap.sort(key=lambda each: not each.endswith(str(cluster.ports[1])))
            await coordinators.call("g", "FetchOffsets", FETCH, 30)
            await asyncio.to_thread(cluster.kill, 2)
            with pytest.raises(BrokerUnavailable):
                await coordinators.call("g", "FetchOffsets", FETCH, 30)
            cluster.groups.move("g", 1)
            await coordinators.call("g", "FetchOffsets", FETCH, 30)

        run(cluster, work)


@pytest.mark.usefixtures("hedged")
def test_a_frozen_coordinator_is_waited_for_only_as_long_as_it_is_the_one() -> None:
    with FakeCluster(nodes=2) as cluster:
        cluster.groups.add("g", 2)

        async def work(coordinators: Coordinators) -> None:
            await coordinators.find("g", 30)
            cluster.freeze(2)
            try:
                with pytest.raises(RequestTimedOut):
                    await coordinators.call("g", "FetchOffsets", FETCH, 1.5)
                await coordinators.find("g", 30)
                calling = asyncio.ensure_future(coordinators.call("g", "FetchOffsets", FETCH, LONG_S))
                await asyncio.sleep(1.0)
                assert not calling.done()
                cluster.groups.move("g", 1)
                started = time.monotonic()
                with pytest.raises(BrokerUnavailable, match="no longer coordinates"):
                    await calling
                assert time.monotonic() - started < SOON_S
                await coordinators.call("g", "FetchOffsets", FETCH, 30)
            finally:
                cluster.thaw(2)

        run(cluster, work)


@pytest.mark.usefixtures("hedged")
def test_a_slow_answer_is_taken_though_nobody_can_be_asked_who_coordinates() -> None:
    with FakeCluster(nodes=1) as cluster:
        cluster.groups.add("g")

        async def work(coordinators: Coordinators) -> None:
            await coordinators.find("g", 30)
            cluster.freeze(1)
            calling = asyncio.ensure_future(coordinators.call("g", "FetchOffsets", FETCH, LONG_S))
            await asyncio.sleep(0.8)
            cluster.thaw(1)
            started = time.monotonic()
            await calling
            assert time.monotonic() - started < SOON_S

        run(cluster, work)


def test_brokers_are_asked_in_no_order() -> None:
    """Else all clients of a large cluster would ask the same one."""
    with FakeCluster(nodes=3) as cluster:

        async def work(coordinators: Coordinators) -> None:
            await coordinators._metadata.refresh()
            random.seed(1)
            assert len({tuple(coordinators._addresses()) for _ in range(50)}) == 6

        run(cluster, work)


def test_before_any_metadata_is_known_brokers_are_asked_in_no_order_either() -> None:
    """Else a first broker that is cut off from the others, and names itself, would be believed all that time."""
    with FakeCluster(nodes=3) as cluster:

        async def work(coordinators: Coordinators) -> None:
            assert not coordinators._metadata.view.brokers
            random.seed(1)
            assert len({tuple(coordinators._addresses()) for _ in range(50)}) == 6

        run(cluster, work)
