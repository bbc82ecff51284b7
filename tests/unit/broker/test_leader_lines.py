"""What is logged of leaderships that come and go."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from broker import role_changes
from raftmeta.image import NO_LEADER
from tests.support import virtual_time
from tests.support.broker_parts import TOPIC_ID, Parts


def counts(caplog: pytest.LogCaptureFixture, level: int) -> Counter[str]:
    events = (vars(record).get("event", "") for record in caplog.records if record.levelno == level)
    return Counter(event for event in events if event.startswith("leader"))


def test_each_has_a_line_but_for_many_that_change_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_changes, "LINES", 3)
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        async with Parts(tmp_path, partitions=5) as parts:
            assert counts(caplog, logging.INFO) == {"leader_gained": 3}, "logs are made one by one"
            assert counts(caplog, logging.DEBUG) == {"leader_gained": 2, "leaderships_changed": 5}
            first = next(record for record in caplog.records if vars(record).get("event") == "leader_gained")
            assert vars(first)["partition"] == "t-0"
            assert vars(first)["leader_epoch"] == 3
            caplog.clear()
            topic = parts.image.topics[TOPIC_ID]
            gone = tuple(replace(part, leader=2, leader_epoch=4, isr=(2,)) for part in topic.partitions)
            image = replace(parts.image, offset=2, topics={TOPIC_ID: replace(topic, partitions=gone)})
            parts.registry.on_metadata(image, None)
            await parts.registry.wait_applied(2)
            (together,) = [record for record in caplog.records if vars(record).get("event") == "leaderships_changed"]
            assert (vars(together)["gained"], vars(together)["lost"]) == (0, 5)
            assert together.levelno == logging.INFO
            assert sum(counts(caplog, level)["leader_lost"] for level in (logging.INFO, logging.DEBUG)) == 5

    virtual_time.run(scenario())  # so that it all happens within a second


def test_a_partition_whose_log_went_with_the_disk_is_named_once_and_told_to_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if vars(record).get("event") == "replica_log_lost"]

    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            topic = parts.image.topics[TOPIC_ID]
            [part] = topic.partitions
            me = part.leader
            for offset in (2, 3):
                gone = replace(
                    part,
                    leader=NO_LEADER,
                    leader_epoch=4,
                    isr=(me,),
                    partition_epoch=part.partition_epoch + offset,
                    lost_replicas=((me, (b"a disk of before",)),),
                )
                image = replace(parts.image, offset=offset, topics={TOPIC_ID: replace(topic, partitions=(gone,))})
                parts.registry.on_metadata(image, None)
                await parts.registry.wait_applied(offset)
            (line,) = lines()
            assert line.levelno == logging.ERROR
            assert vars(line)["partition"] == "t-0"
            refused = role_changes.refusal(image, image.topics[TOPIC_ID], gone)
            for text in (line.getMessage(), str(refused)):
                assert f"broker {me} alone had every record and came back without the log" in text
                assert "raftlog partition elect t --unclean" in text

    asyncio.run(scenario())
