"""Consume, transform, produce, in a process that may be killed at any moment: `python -m tests.support.transform_worker
BOOTSTRAP GROUP TRANSACTIONAL_ID SOURCE TARGET`. What it does is what docs/recipes.md says."""

from __future__ import annotations

import logging
import sys
import time

from raftlog import Consumer, Producer, Record, TopicPartition
from raftlog.errors import (
    FencedError,
    InvalidRequestError,
    ProducerFenced,
    RaftlogError,
    RetriableError,
    TransactionAbortable,
)

TIMEOUT_MS = 3000
"""Of a transaction that a killed worker leaves open."""
PAUSE_S = 0.05
"""How long the work of a transaction takes, so that it is in the middle of one that it is killed."""


def after(records: list[Record]) -> dict[TopicPartition, int]:
    """Return the offsets of the next records."""
    return {TopicPartition(record.topic, record.partition): record.offset + 1 for record in records}


def back_to_committed(consumer: Consumer) -> None:
    """Read the inputs of the aborted transaction again."""
    for part, committed in consumer.committed().items():
        try:
            if committed is None:
                consumer.seek_to_beginning(part)
            else:
                consumer.seek(part, committed.offset)
        except InvalidRequestError:  # it was lost meanwhile
            pass


def work(bootstrap: str, group_id: str, transactional_id: str, source: str, target: str) -> None:
    """Go on for ever."""
    with (
        Consumer(
            bootstrap,
            group_id=group_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_poll_records=20,
        ) as consumer,
        Producer(bootstrap, transactional_id=transactional_id, transaction_timeout_ms=TIMEOUT_MS) as producer,
    ):
        consumer.subscribe(source)
        print("up", flush=True)
        while True:
            records = consumer.poll(timeout=1)
            if not records:
                continue
            try:
                producer.begin_transaction()
                for record in records:
                    producer.send(target, record.value, key=record.key)
                time.sleep(PAUSE_S)
                producer.send_offsets_to_transaction(after(records), consumer.group_metadata())
                commit(producer)
            except ProducerFenced:
                raise
            except (TransactionAbortable, FencedError) as error:
                logging.info("once more: %s", error)
                producer.abort_transaction()
                back_to_committed(consumer)


def commit(producer: Producer) -> None:
    """Commit, asking as long as the outcome is not known."""
    while True:
        try:
            producer.commit_transaction()
            return
        except RetriableError as error:
            logging.info("not known yet: %s", error)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        work(*sys.argv[1:])
    except RaftlogError as error:
        sys.exit(f"{type(error).__name__}: {error}")
