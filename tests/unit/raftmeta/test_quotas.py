"""Quotas in the metadata: what is kept, what is refused, and what changes nothing (KIP-546)."""

from __future__ import annotations

import pytest

from raftlog.errors import InvalidRequestError, UnsupportedVersion
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult, decide, security
from raftmeta.image import MetadataImage
from raftmeta.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    PRODUCER_BYTE_RATE,
    QuotaEntity,
    matches,
)
from raftmeta.replay import image_from_records
from tests.support.metadata import accept, claim, image_after, refusal, register, update_feature
from tests.support.metadata_security import alter_quotas as alter

EMPTY = image_after(claim(newest=True))
ALICE = QuotaEntity("alice")


def test_quotas_are_set_changed_and_removed() -> None:
    image, _ = accept(
        EMPTY,
        alter(
            (ALICE, PRODUCER_BYTE_RATE, 1_000),
            (ALICE, CONSUMER_BYTE_RATE, 2_000),
            (QuotaEntity(ip="::ffff:10.0.0.1"), CONNECTION_CREATION_RATE, 5),
        ),
    )
    assert image.quotas == {
        ALICE: {PRODUCER_BYTE_RATE: 1_000, CONSUMER_BYTE_RATE: 2_000},
        QuotaEntity(ip="10.0.0.1"): {CONNECTION_CREATION_RATE: 5},
    }
    changed, _ = accept(image, alter((ALICE, PRODUCER_BYTE_RATE, 1.5), (ALICE, CONSUMER_BYTE_RATE, None)))
    assert changed.quotas[ALICE] == {PRODUCER_BYTE_RATE: 1.5}
    gone, _ = accept(changed, alter((ALICE, PRODUCER_BYTE_RATE, None)))
    assert list(gone.quotas) == [QuotaEntity(ip="10.0.0.1")]


def test_a_snapshot_has_the_quotas() -> None:
    image = image_after(
        claim(newest=True),
        alter(
            (QuotaEntity(DEFAULT, "app"), PRODUCER_BYTE_RATE, 7),
            (QuotaEntity(client_id=DEFAULT), CONSUMER_BYTE_RATE, 8),
            (QuotaEntity(ip=DEFAULT), CONNECTION_CREATION_RATE, 9),
        ),
    )
    assert image_from_records(image.to_records(), image.offset) == image


@pytest.mark.parametrize(
    "command",
    [
        alter((ALICE, PRODUCER_BYTE_RATE, 1_000)),
        alter((ALICE, CONSUMER_BYTE_RATE, None)),
        alter((ALICE, PRODUCER_BYTE_RATE, 5), validate_only=True),
        alter(),
    ],
)
def test_what_changes_nothing_writes_nothing(command: MetadataCommand) -> None:
    image, _ = accept(EMPTY, alter((ALICE, PRODUCER_BYTE_RATE, 1_000)))
    decision = decide(image, command)
    assert decision.records == ()
    assert decision.outcome == CommandResult(image.offset)


@pytest.mark.parametrize(
    ("entity", "key", "value", "why"),
    [
        (QuotaEntity(), PRODUCER_BYTE_RATE, 1, "names none"),
        (QuotaEntity("alice", ip="10.0.0.1"), CONNECTION_CREATION_RATE, 1, "stands alone"),
        (QuotaEntity(ip="10.0.0.1"), PRODUCER_BYTE_RATE, 1, "use connection_creation_rate"),
        (ALICE, CONNECTION_CREATION_RATE, 1, "use producer_byte_rate"),
        (ALICE, "leader.replication.throttled.rate", 1, "is not a quota"),
        (ALICE, PRODUCER_BYTE_RATE, 0, "from 0.001"),
        (ALICE, PRODUCER_BYTE_RATE, -1, "from 0.001"),
        (ALICE, PRODUCER_BYTE_RATE, float("nan"), "from 0.001"),
        (ALICE, PRODUCER_BYTE_RATE, float("inf"), "from 0.001"),
        (ALICE, PRODUCER_BYTE_RATE, 2.0**54, "to 2^53"),
        (QuotaEntity(ip="example.org"), CONNECTION_CREATION_RATE, 1, "not an IP address"),
        (QuotaEntity("a\nb"), PRODUCER_BYTE_RATE, 1, "control character"),
        (QuotaEntity(client_id="x" * 256), PRODUCER_BYTE_RATE, 1, "256 characters"),
        (ALICE, "no_such_rate", None, "is not a quota"),
    ],
)
def test_what_cannot_be_a_quota_is_refused(entity: QuotaEntity, key: str, value: float | None, why: str) -> None:
    error = refusal(EMPTY, alter((entity, key, value)))
    assert isinstance(error, InvalidRequestError)
    assert why in str(error)


def test_all_or_none_and_nothing_twice() -> None:
    twice = alter((ALICE, PRODUCER_BYTE_RATE, 1), (ALICE, PRODUCER_BYTE_RATE, 2))
    assert "named twice" in str(refusal(EMPTY, twice))
    one_bad = alter((ALICE, PRODUCER_BYTE_RATE, 1), (ALICE, CONSUMER_BYTE_RATE, 0))
    assert decide(EMPTY, one_bad).records == ()


def test_before_metadata_version_6_there_are_none() -> None:
    older = image_after(claim(), register(), update_feature("metadata.version", 5))
    error = refusal(older, alter((ALICE, PRODUCER_BYTE_RATE, 1)))
    assert isinstance(error, UnsupportedVersion)
    assert "a quota needs metadata.version=6, the cluster is at 5" in str(error)


def test_a_cluster_has_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "MAX_QUOTAS", 2)
    image, _ = accept(EMPTY, alter((ALICE, PRODUCER_BYTE_RATE, 1), (ALICE, CONSUMER_BYTE_RATE, 1)))
    more = (QuotaEntity("bob"), PRODUCER_BYTE_RATE, 1.0)
    assert "at most 2 are allowed" in str(refusal(image, alter(more)))
    replaced, _ = accept(image, alter(more, (ALICE, CONSUMER_BYTE_RATE, None)))
    assert len(replaced.quotas) == 2


def test_filters_find_entities_as_kip_546_says() -> None:
    both, alone, default = QuotaEntity("alice", "app"), QuotaEntity("alice"), QuotaEntity(DEFAULT)

    def found(wanted: QuotaEntity, *, strict: bool = False) -> list[QuotaEntity]:
        return [each for each in (both, alone, default) if matches(each, wanted, strict=strict)]

    assert found(QuotaEntity()) == [both, alone, default]
    assert found(QuotaEntity("alice")) == [both, alone]
    assert found(QuotaEntity("alice"), strict=True) == [alone]
    assert found(QuotaEntity(DEFAULT)) == [default]
    assert found(QuotaEntity(client_id="app")) == [both]


def test_an_image_without_a_change_keeps_the_same_quotas() -> None:
    image, _ = accept(EMPTY, alter((ALICE, PRODUCER_BYTE_RATE, 1)))
    other: MetadataImage = accept(image, alter((QuotaEntity("bob"), PRODUCER_BYTE_RATE, 1)))[0]
    assert other.quotas is not image.quotas
