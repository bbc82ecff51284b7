"""What tools are shown."""

from __future__ import annotations

import pytest

from broker.transactions import listing
from raftlog.errors import InvalidRequestError, TransactionalIdNotFound, from_wire
from raftlog.v1 import transaction_pb2
from raftlog.v1.transaction_pb2 import ListTransactionsRequest
from tests.support.transaction_driver import WALL_MS, TransactionDriver, parts


@pytest.fixture
def driver() -> TransactionDriver:
    """Ids in every state, and a sink with a stage in every state."""
    driver = TransactionDriver()
    for name in ("empty", "ongoing", "committing", "aborting", "committed", "aborted"):
        producer = driver.init(name)
        if name == "empty":
            continue
        driver.add(producer, 0)
        if name.startswith("commit"):
            driver.end(producer, commit=True)
        elif name.startswith("abort"):
            driver.end(producer, commit=False)
        if name in ("committed", "aborted"):
            driver.pending.insert(0, driver.pending.pop())
            driver.write_markers(1)
    first, second = driver.init_stage(0, 0), driver.init_stage(0, 0)
    driver.commit(0, first)
    driver.init_stage(1, 0, attempt="3.1")
    driver.wait(10)
    assert second
    return driver


def ids(response: transaction_pb2.ListTransactionsResponse) -> list[tuple[str, str]]:
    return [
        (each.transactional_id or each.sink_id, transaction_pb2.TransactionState.Name(each.state))
        for each in response.transactions
    ]


EVERYTHING = [
    ("aborted", "COMPLETE_ABORT"),
    ("aborting", "PREPARE_ABORT"),
    ("committed", "COMPLETE_COMMIT"),
    ("committing", "PREPARE_COMMIT"),
    ("empty", "TRANSACTION_EMPTY"),
    ("ongoing", "TRANSACTION_ONGOING"),
    ("s", "PREPARE_COMMIT"),
    ("s", "PREPARE_ABORT"),
    ("s", "TRANSACTION_ONGOING"),
]


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_everything_by_id_a_piece_at_a_time(
    driver: TransactionDriver, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PIECE", piece)
    shown = driver.list(ListTransactionsRequest())
    assert ids(shown) == EVERYTHING
    (sink,) = shown.sinks
    assert (sink.sink_id, sink.target, sink.last_batch_id, sink.open_stages) == ("s", "t", 0, 1)
    assert sink.updated_ms == WALL_MS + 1000


def test_by_state_and_by_producer_id_no_sinks_are_shown(driver: TransactionDriver) -> None:
    shown = driver.list(ListTransactionsRequest(states=[transaction_pb2.PREPARE_ABORT]))
    assert ids(shown) == [each for each in EVERYTHING if each[1] == "PREPARE_ABORT"]
    assert not shown.sinks
    producer_id = driver.core.transactions["ongoing"].producer_id
    shown = driver.list(ListTransactionsRequest(producer_ids=[producer_id]))
    assert ids(shown) == [("ongoing", "TRANSACTION_ONGOING")]
    assert not shown.sinks


def test_those_that_run_for_longer(driver: TransactionDriver) -> None:
    driver.wait(9_000)
    driver.add(driver.init("young"), 0)
    shown = driver.list(ListTransactionsRequest(running_longer_than_ms=5_000))
    assert [each[0] for each in ids(shown)] == ["aborting", "committing", "ongoing", "s", "s", "s"]


def test_a_description(driver: TransactionDriver) -> None:
    shown = driver.describe("committing")
    assert shown.state == transaction_pb2.PREPARE_COMMIT
    assert shown.producer_epoch == 1
    assert shown.started_ms == WALL_MS + 1000
    assert [(each.topic_id, *each.partitions) for each in shown.partitions] == parts(0)
    assert shown.pending == shown.partitions
    shown = driver.describe("ongoing")
    assert (shown.timeout_ms, len(shown.partitions), len(shown.pending)) == (60_000, 1, 0)
    assert isinstance(from_wire(driver.describe("unknown").error), TransactionalIdNotFound)


def test_a_list_by_too_many_ids_is_refused(driver: TransactionDriver) -> None:
    with pytest.raises(InvalidRequestError, match="names 10001 producer ids, it may name 10000"):
        driver.list(ListTransactionsRequest(producer_ids=range(10_001)))


def test_what_is_asked_for_is_read_once_for_all_pieces(
    driver: TransactionDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[ListTransactionsRequest] = []
    real = listing.wanted

    def noted(request: ListTransactionsRequest, now_ms: int) -> listing.Shown:
        read.append(request)
        return real(request, now_ms)

    monkeypatch.setattr(listing, "PIECE", 1)
    monkeypatch.setattr(listing, "wanted", noted)
    assert ids(driver.list(ListTransactionsRequest(producer_ids=range(10_000)))) == EVERYTHING
    assert len(read) == 1
