"""A lease is granted only after a majority round that began after the heartbeat, and only to who may have it."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

from raftlog.errors import BrokerIdNotRegistered, InconsistentClusterId, NotController, StaleBrokerEpoch
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftmeta.image import BrokerImage, MetadataImage
from raftmeta.quorum.heartbeat_desk import HeartbeatDesk
from raftmeta.quorum.sessions import BrokerSessions

LEASE_MS, SESSION_MS = 1_200, 1_500


class Reads:
    """Majority rounds that end when the test says so."""

    def __init__(self) -> None:
        self.rounds: list[asyncio.Future[int]] = []

    def read_index(self) -> asyncio.Future[int]:
        self.rounds.append(asyncio.get_running_loop().create_future())
        return self.rounds[-1]


class Rig:
    """A desk with one unfenced broker, 1 of epoch 5."""

    def __init__(self) -> None:
        self.image = MetadataImage(
            offset=50, cluster_id="c", controller_epoch=3, brokers={1: BrokerImage(1, bytes(16), 5, "h", 1)}
        )
        self.now_ms = 0.0
        self.woken = 0
        self.reads = Reads()
        self.sessions = BrokerSessions(SESSION_MS, LEASE_MS)
        self.sessions.activate(0, self.image)
        self.desk = HeartbeatDesk(
            3,
            self.sessions,
            self.reads,
            lambda: self.image,
            lambda: self.now_ms,
            self.wake,
            lambda broker_id: True,
            lambda: ControllerHint(controller_id=2, controller_epoch=4, host="h", port=9),
        )

    def wake(self) -> None:
        self.woken += 1

    def set_broker(self, **changes: object) -> None:
        broker = replace(self.image.brokers[1], **changes)  # type: ignore[arg-type] # names and values of its fields
        self.image = replace(self.image, offset=self.image.offset + 1, brokers={1: broker})
        self.sessions.observe(self.now_ms, self.image)

    def beat(
        self, sequence: int = 1, epoch: int = 5, applied: int = 99, **more: object
    ) -> asyncio.Future[HeartbeatResponse]:
        request = HeartbeatRequest(
            broker_id=1,
            broker_epoch=epoch,
            sequence=sequence,
            applied_offset=applied,
            **more,  # type: ignore[arg-type]
        )
        return self.desk.take(request, "stream")


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_heartbeat_waits_for_a_round_that_begins_after_it() -> None:
    async def scenario() -> None:
        rig = Rig()
        first = rig.beat(1)
        await turn()
        second, third = rig.beat(2), rig.beat(3)
        assert len(rig.reads.rounds) == 1, "the second one shares the next round, not the one under way"
        rig.reads.rounds[0].set_result(50)
        await turn()
        assert first.result().lease_ms == LEASE_MS
        assert not second.done()
        assert len(rig.reads.rounds) == 2
        rig.reads.rounds[1].set_result(50)
        await turn()
        assert [second.result().sequence, third.result().sequence] == [2, 3]
        assert second.result().controller_epoch == 3
        assert second.result().metadata_offset == 50

    asyncio.run(scenario())


def test_without_a_majority_there_is_no_lease_but_the_way_to_another_controller() -> None:
    async def scenario() -> None:
        rig = Rig()
        first = rig.beat(1)
        second = rig.beat(2)
        rig.reads.rounds[0].set_exception(NotController("deposed"))
        await turn()
        for answer in (first.result(), second.result()):
            assert answer.error.code == NotController.code
            assert answer.lease_ms == 0
            assert answer.controller.controller_id == 2

    asyncio.run(scenario())


def test_what_counts_is_the_image_when_the_majority_has_answered() -> None:
    async def scenario() -> None:
        rig = Rig()
        fenced = rig.beat(1)
        rig.set_broker(fenced=True)
        rig.reads.rounds[0].set_result(51)
        await turn()
        assert fenced.result().fenced
        assert fenced.result().lease_ms == 0

        rig = Rig()
        replaced = rig.beat(1)
        rig.set_broker(broker_epoch=51)
        rig.reads.rounds[0].set_result(51)
        await turn()
        assert replaced.result().error.code == StaleBrokerEpoch.code

        rig = Rig()
        removed = rig.beat(1)
        rig.image = replace(rig.image, brokers={})
        rig.reads.rounds[0].set_result(51)
        await turn()
        assert removed.result().error.code == BrokerIdNotRegistered.code

    asyncio.run(scenario())


def test_a_round_that_fails_after_the_end_of_the_term_leaves_nothing_unretrieved() -> None:
    async def scenario() -> None:
        said: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        rig = Rig()
        rig.beat(1)
        rig.desk.close()
        rig.reads.rounds[0].set_exception(NotController("deposed"))
        await turn()
        rig.reads.rounds.clear()
        gc.collect()
        assert said == []

    asyncio.run(scenario())


def test_a_report_says_since_when_a_broker_stands_still() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.beat(1, applied=50)
        report = rig.desk.reports[1]
        assert report.catch_up_to == 50
        assert report.stands_since_ms == float("inf")
        rig.set_broker(host="other")
        rig.now_ms = 7.0
        rig.beat(2, applied=50)
        assert report.stands_since_ms == 7.0

    asyncio.run(scenario())


def test_a_broker_that_is_about_to_be_fenced_gets_no_lease() -> None:
    async def scenario() -> None:
        rig = Rig()
        waiting = rig.beat(1)
        rig.now_ms = SESSION_MS + 1
        assert rig.sessions.expired(rig.now_ms, rig.image) == [(1, 5)]
        rig.reads.rounds[0].set_result(50)
        await turn()
        assert waiting.result().lease_ms == 0
        late = rig.beat(2)
        rig.reads.rounds[1].set_result(50)
        await turn()
        assert late.result().lease_ms == 0

    asyncio.run(scenario())


def test_a_broker_that_acts_on_an_older_image_than_its_unfencing_gets_no_lease() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.set_broker(fenced=True)
        rig.set_broker(fenced=False)  # at offset 52
        behind = rig.beat(1, applied=51)
        rig.reads.rounds[0].set_result(52)
        await turn()
        assert behind.result().lease_ms == 0
        there = rig.beat(2, applied=52)
        rig.reads.rounds[1].set_result(52)
        await turn()
        assert there.result().lease_ms == LEASE_MS

    asyncio.run(scenario())


def test_who_has_given_its_lease_up_gets_none() -> None:
    async def scenario() -> None:
        rig = Rig()
        answer = rig.beat(1, wants_shutdown=True, lease_released=True)
        rig.reads.rounds[0].set_result(50)
        await turn()
        assert answer.result().lease_ms == 0
        assert answer.result().may_shut_down
        assert rig.woken > 0

    asyncio.run(scenario())


def test_a_broker_of_another_cluster_is_told_so() -> None:
    async def scenario() -> None:
        rig = Rig()
        answer = rig.beat(1, cluster_id="other")
        rig.reads.rounds[0].set_result(50)
        await turn()
        assert answer.result().error.code == InconsistentClusterId.code
        assert rig.desk.reports == {}

    asyncio.run(scenario())


def test_only_the_newest_stream_of_a_broker_counts_when_one_ends() -> None:
    async def scenario() -> None:
        rig = Rig()
        request = HeartbeatRequest(broker_id=1, broker_epoch=5, sequence=1, applied_offset=99)
        rig.desk.take(request, "old")
        rig.desk.take(request, "new")
        rig.desk.stream_closed("old")
        deadline = rig.sessions.next_deadline_ms()
        assert deadline == SESSION_MS
        rig.desk.stream_closed("new")
        shortened = rig.sessions.next_deadline_ms()
        assert shortened is not None
        assert LEASE_MS < shortened < SESSION_MS

    asyncio.run(scenario())


def test_the_end_of_the_term_answers_everybody() -> None:
    async def scenario() -> None:
        rig = Rig()
        waiting = [rig.beat(1), rig.beat(2)]
        rig.desk.close()
        late = rig.beat(3)
        rig.reads.rounds[0].set_result(50)
        await turn()
        assert {answer.result().error.code for answer in (*waiting, late)} == {NotController.code}

    asyncio.run(scenario())
