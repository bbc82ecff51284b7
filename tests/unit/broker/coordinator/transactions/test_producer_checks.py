"""A client that may write the topic, and what it cannot do with producer ids of others; see `verifier.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from broker.coordinator.transactions import verifier
from broker.coordinator.transactions.coordinator import verify, verify_stage
from broker.coordinator.transactions.transaction import Sink, Stage, State, Transaction
from broker.coordinator.transactions.verifier import MAX_OWN, ProducerChecks
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.heavy_work import HeavyWork
from broker.security.caller import EVERYTHING_ALLOWED, Caller
from broker.turns import SharedTurns
from raftlog.errors import CoordinatorLoadInProgress, InvalidProducerIdMapping, RaftlogError
from raftlog.format import Attributes
from raftlog.format.wire import Produce
from raftlog.v1 import common_pb2, log_pb2
from raftlog.v1.security_pb2 import Acl
from raftlog.v1.transaction_pb2 import VerifyTransactionRequest
from raftmeta.features import METADATA_VERSION, PRODUCER_OWNERS_LEVEL
from raftmeta.image import MetadataImage
from raftmeta.producer_ids import TAG_BITS, ProducerIdKey, ProducerOwner
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, ProduceWriter, Requests
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.raw_client import RawClient

KEY = ProducerIdKey(bytes(range(32)), 100)
ALICE, MALLORY = ProducerOwner.principal("User:alice"), ProducerOwner.principal("User:mallory")
PAYMENTS, SINK = ProducerOwner.transactional("payments"), ProducerOwner.sink("sink")
OLD_ID = 7
"""Given out before the cluster had a secret."""
WRITE, WRITE_ID = (Acl.WRITE, Acl.TOPIC, "t"), (Acl.WRITE, Acl.TRANSACTIONAL_ID, "mallorys")


class Coordinators:
    """The coordinators of all transactions, as cores without a log; `asked` counts calls."""

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.sinks: dict[str, Sink] = {}
        self.asked = 0
        self.refusal: RaftlogError | None = None

    def open(self, transactional_id: str, producer_id: int, epoch: int = 0, partition: int = 0) -> None:
        partitions = frozenset({(TOPIC_ID, partition)})
        self.transactions[transactional_id] = Transaction(
            producer_id, epoch, State.ONGOING, 60_000, 0, partitions=partitions
        )

    async def verify(self, request: VerifyTransactionRequest, wait_s: float) -> None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        if request.sink_id:
            verify_stage(self.sinks.get(request.sink_id) or Sink(request.sink_id), request)
        else:
            verify(self.transactions.get(request.transactional_id), request)


class World:
    """One partition, its clients, and the coordinators. `mallory` may write the topic and nothing else."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.coordinators = Coordinators()
        self.image = MetadataImage(
            features={METADATA_VERSION: PRODUCER_OWNERS_LEVEL}, next_producer_id=10_000, producer_id_key=KEY
        )
        self.partition = parts.registry.find(TOPIC_ID, 0)

    async def send(self, batch: bytes, who: Caller, *, transactional_id: str = "", sink_id: str = "") -> str:
        """Return the name of the code that a produce stream of its own answers with."""
        checks = ProducerChecks(who, lambda: self.image, cast(Any, self.coordinators))
        session = ProduceSession(
            self.parts.registry,
            SharedTurns(TURN_BYTES),
            HeavyWork(self.parts.disk),
            max_in_flight=5,
            default_timeout_ms=30_000,
            who=who,
            producers=checks,
        )
        requests, answers = Requests[Produce](), ProduceWriter()
        request = RawClient.request(1, [(TOPIC_ID, 0, 3, 1, batch)], log_pb2.ALL)
        request.head.transactional_id, request.head.sink_id = transactional_id, sink_id
        requests.send(request)
        requests.end()
        await session.run(aiter(requests), answers)
        return common_pb2.ErrorCode.Name(answers.written[0].results[0].error.code)

    def untouched(self) -> bool:
        """Whether nothing is in the log, and nothing is remembered of any producer."""
        return self.partition.log_end_offset == 0 and len(self.partition.log.producers) == 0


@asynccontextmanager
async def world(path: Path) -> AsyncIterator[World]:
    async with Parts(path) as parts:
        yield World(parts)


def run(path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), world(path) as made:
            await scenario(made)

    asyncio.run(main())


def caller(name: str = "User:mallory") -> Caller:
    return FakeAuthorizer(WRITE, WRITE_ID).caller(name)


def plain(producer_id: int, epoch: int = 0, sequence: int = 0) -> bytes:
    return batch_of(b"p", producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


def transactional(producer_id: int, epoch: int = 0, sequence: int = 0) -> bytes:
    return batch_of(
        b"t",
        attributes=int(Attributes.TRANSACTIONAL),
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


# The attacks


def test_ids_that_were_never_given_out_cannot_be_burnt(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        for number in (100, 10_000, 10_001, 1 << 38):
            for producer_id in (number << TAG_BITS, KEY.bind(number, ALICE)):
                assert await made.send(plain(producer_id, 32_767), caller()) == "INVALID_PRODUCER_ID_MAPPING"
        assert await made.send(transactional(2**62, 32_767), caller(), transactional_id="mallorys") == (
            "INVALID_PRODUCER_ID_MAPPING"
        )
        assert made.untouched()

    run(tmp_path, scenario)


def test_nobody_writes_into_the_open_transaction_of_another_owner(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        victim = KEY.bind(200, PAYMENTS)
        made.coordinators.open("payments", victim)
        owner = FakeAuthorizer(WRITE, (Acl.WRITE, Acl.TRANSACTIONAL_ID, "payments")).caller()
        assert await made.send(transactional(victim), owner, transactional_id="payments") == "NONE"
        stolen = transactional(victim, sequence=1)
        assert await made.send(stolen, caller(), transactional_id="payments") == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
        assert await made.send(stolen, caller(), transactional_id="mallorys") == "INVALID_PRODUCER_ID_MAPPING"
        assert await made.send(stolen, caller()) == "UNSUPPORTED_VERSION"
        assert await made.send(stolen, caller(), transactional_id="mallorys", sink_id="s") == "INVALID_REQUEST"
        assert await made.send(transactional(victim, sequence=1), owner, transactional_id="payments") == "NONE"
        assert made.partition.log_end_offset == 2

    run(tmp_path, scenario)


def test_an_owner_whose_name_was_chosen_to_match_an_id_does_not_write_into_its_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with a permission for a prefix of transactional ids tries names until one has the tag of another's."""
    monkeypatch.setattr(ProducerIdKey, "_tag", lambda key, number, owner: 5)

    async def scenario(made: World) -> None:
        victim = KEY.bind(200, PAYMENTS)
        made.coordinators.open("payments", victim)
        for sequence in range(2):
            batch = transactional(victim, sequence=sequence)
            assert await made.send(batch, EVERYTHING_ALLOWED, transactional_id="payments") == "NONE"
            stolen = transactional(victim, sequence=sequence + 1)
            assert await made.send(stolen, caller(), transactional_id="mallorys") == "INVALID_PRODUCER_ID_MAPPING"
        made.coordinators.open("mallorys", victim + 1)
        assert await made.send(stolen, caller(), transactional_id="mallorys") == "INVALID_PRODUCER_ID_MAPPING"
        assert made.partition.log_end_offset == 2

    run(tmp_path, scenario)


def test_what_is_remembered_of_verified_transactions_is_bounded_by_the_open_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "MAX_CLOSED", 3)

    async def scenario(made: World) -> None:
        for number in range(200, 220):
            owner = ProducerOwner.transactional(f"payments-{number}")
            made.coordinators.open(owner.name, KEY.bind(number, owner), partition=0)
            batch = transactional(KEY.bind(number, owner))
            assert await made.send(batch, EVERYTHING_ALLOWED, transactional_id=owner.name) == "NONE"
            if number < 210:
                made.partition.log.producers.transactions.end(KEY.bind(number, owner), number)
        open_now = len(made.partition.log.producers.transactions)
        assert open_now == 10
        assert len(made.partition.verified_owners) <= open_now + 3

    run(tmp_path, scenario)


def test_a_plain_batch_on_the_id_of_a_transaction_is_refused(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        victim = KEY.bind(200, PAYMENTS)
        made.coordinators.open("payments", victim)
        for who in (caller(), EVERYTHING_ALLOWED):
            assert await made.send(plain(victim), who) == "INVALID_PRODUCER_ID_MAPPING"
        assert made.untouched()

    run(tmp_path, scenario)


def test_nobody_fences_an_id_with_an_epoch_that_was_never_given_out(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        victim = KEY.bind(200, PAYMENTS)
        made.coordinators.open("payments", victim, epoch=3)
        assert await made.send(transactional(victim, 32_767), EVERYTHING_ALLOWED, transactional_id="payments") == (
            "INVALID_PRODUCER_EPOCH"
        )
        assert await made.send(transactional(victim, 2), EVERYTHING_ALLOWED, transactional_id="payments") == (
            "INVALID_PRODUCER_EPOCH"
        )
        assert made.untouched()
        assert await made.send(transactional(victim, 3), EVERYTHING_ALLOWED, transactional_id="payments") == "NONE"

    run(tmp_path, scenario)


def test_a_plain_id_belongs_to_the_principal_that_it_was_given_to(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        mine = KEY.bind(300, ALICE)
        assert await made.send(plain(mine), caller("User:alice")) == "NONE"
        assert await made.send(plain(mine, 32_767), caller()) == "INVALID_PRODUCER_ID_MAPPING"
        assert await made.send(plain(mine, 1), caller("User:alice")) == "NONE", (
            "the owner of a producer id must be able to use any epoch of it"
        )
        assert await made.send(batch_of(b"without an id"), caller()) == "NONE"

    run(tmp_path, scenario)


def test_producers_that_share_a_stream_have_their_ids_checked_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is checked with an HMAC, and 32 producers of a call send by turns."""
    checked: list[int] = []
    owns = ProducerIdKey.owns

    def counted(key: ProducerIdKey, owner: ProducerOwner, producer_id: int) -> bool:
        checked.append(producer_id)
        return owns(key, owner, producer_id)

    monkeypatch.setattr(ProducerIdKey, "owns", counted)
    image = MetadataImage(
        features={METADATA_VERSION: PRODUCER_OWNERS_LEVEL}, next_producer_id=10_000, producer_id_key=KEY
    )
    checks = ProducerChecks(caller("User:alice"), lambda: image, cast(Any, Coordinators()))
    head = log_pb2.ProduceRequest()
    many = [KEY.bind(number, ALICE) for number in range(300, 300 + MAX_OWN)]
    for _ in range(2):
        for producer_id in many:
            checks.check_id(head, producer_id, transactional=False)
    assert checked == many
    foreign = KEY.bind(300, MALLORY)
    for _ in range(2):
        with pytest.raises(InvalidProducerIdMapping):
            checks.check_id(head, foreign, transactional=False)
    checks.check_id(head, KEY.bind(300 + MAX_OWN, ALICE), transactional=False)
    assert len(checks._own) <= MAX_OWN


# Verification


def test_a_partition_that_was_not_added_takes_no_record(tmp_path: Path) -> None:
    """KIP-890: nothing would ever decide about it."""

    async def scenario(made: World) -> None:
        mine = KEY.bind(200, PAYMENTS)
        made.coordinators.open("payments", mine, partition=1)
        send = made.send(transactional(mine), EVERYTHING_ALLOWED, transactional_id="payments")
        assert await send == "INVALID_TXN_STATE"
        assert made.untouched()

    run(tmp_path, scenario)


def test_the_coordinator_is_asked_once_for_each_transaction(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        mine = KEY.bind(200, PAYMENTS)
        made.coordinators.open("payments", mine)
        for sequence in range(3):
            batch = transactional(mine, sequence=sequence)
            assert await made.send(batch, EVERYTHING_ALLOWED, transactional_id="payments") == "NONE"
        assert made.coordinators.asked == 1

    run(tmp_path, scenario)


def test_a_coordinator_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        mine = KEY.bind(200, PAYMENTS)
        made.coordinators.refusal = CoordinatorLoadInProgress("not now")
        send = made.send(transactional(mine), EVERYTHING_ALLOWED, transactional_id="payments")
        assert await send == "COORDINATOR_LOAD_IN_PROGRESS"
        made.coordinators.refusal = None
        made.coordinators.open("payments", mine)
        assert await made.send(transactional(mine), EVERYTHING_ALLOWED, transactional_id="payments") == "NONE"

    run(tmp_path, scenario)


@pytest.mark.parametrize("change", ["", "gone", "elsewhere", "epoch"])
def test_a_stage_is_verified_like_a_transaction(tmp_path: Path, change: str) -> None:
    async def scenario(made: World) -> None:
        stage = KEY.bind(200, SINK)
        where = (TOPIC_ID, 1 if change == "elsewhere" else 0)
        if change != "gone":
            staged = Stage(1, 0, 60_000, partitions=frozenset({where}))
            made.coordinators.sinks["sink"] = Sink("sink", stages={stage: staged})
        batch = transactional(stage, 1 if change == "epoch" else 0)
        code = await made.send(batch, EVERYTHING_ALLOWED, sink_id="sink")
        expected = {"": "NONE", "epoch": "INVALID_PRODUCER_EPOCH"}
        assert code == expected.get(change, "INVALID_TXN_STATE")
        assert made.untouched() == bool(change)
        assert await made.send(batch, EVERYTHING_ALLOWED, sink_id="another") == "INVALID_PRODUCER_ID_MAPPING"

    run(tmp_path, scenario)


# Ids from before


def test_an_older_id_goes_on_and_its_transactions_are_verified_by_each_stream(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        assert await made.send(plain(OLD_ID + 1), caller()) == "NONE"
        made.coordinators.open("payments", OLD_ID)
        assert await made.send(transactional(OLD_ID), EVERYTHING_ALLOWED, transactional_id="payments") == "NONE"
        stolen = transactional(OLD_ID, sequence=1)
        assert await made.send(stolen, caller(), transactional_id="mallorys") == "INVALID_PRODUCER_ID_MAPPING"
        assert await made.send(stolen, EVERYTHING_ALLOWED, transactional_id="payments") == "NONE"
        assert made.coordinators.asked == 3

    run(tmp_path, scenario)


def test_without_a_secret_an_unknown_id_may_be_known_later(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        made.image = MetadataImage(features=made.image.features, next_producer_id=5)
        assert await made.send(plain(4), EVERYTHING_ALLOWED) == "NONE"
        assert await made.send(plain(5), EVERYTHING_ALLOWED) == "LEADER_NOT_AVAILABLE"
        assert await made.send(plain(KEY.bind(300, ALICE)), caller("User:alice")) == "LEADER_NOT_AVAILABLE"

    run(tmp_path, scenario)


def test_a_transactional_batch_whose_owner_is_not_named_asks_for_no_permission(tmp_path: Path) -> None:
    """A grant of all transactional ids, which a refusal would propose, would not help."""

    async def scenario(made: World) -> None:
        stranger = FakeAuthorizer(WRITE).caller("User:guest")
        assert await made.send(transactional(KEY.bind(200, PAYMENTS)), stranger) == "UNSUPPORTED_VERSION"
        assert made.untouched()

    run(tmp_path, scenario)


def test_below_the_metadata_version_nothing_is_required(tmp_path: Path) -> None:
    async def scenario(made: World) -> None:
        made.image = MetadataImage(features={METADATA_VERSION: PRODUCER_OWNERS_LEVEL - 1})
        assert await made.send(plain(12), EVERYTHING_ALLOWED) == "NONE"
        assert await made.send(transactional(13), EVERYTHING_ALLOWED) == "NONE"
        assert made.coordinators.asked == 0

    run(tmp_path, scenario)
