"""The state machine: fencing, retries, digests, snapshots, replay, and its history of changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftlog.errors import (
    CorruptRecordError,
    FencedController,
    RaftlogError,
    RequestTimedOut,
    TopicAlreadyExists,
    UnsupportedVersion,
)
from raftlog.v1.common_pb2 import INVALID_UPDATE_VERSION, Error
from raftlog.v1.records_pb2 import (
    AlterationOutcome,
    AlterPartitionsCommand,
    ClientSession,
    DeleteTopicCommand,
    IsrMember,
    MetadataCommand,
    MetadataRecord,
    MetadataSnapshot,
    PartitionAlteration,
    StateDigestCommand,
)
from raftmeta.decide import CommandResult, decide, outcome_from_wire, outcome_to_wire
from raftmeta.decide.outcome import MAX_ALTERATION_ERROR_CHARACTERS, MAX_ERROR_CHARACTERS
from raftmeta.features import ALTER_PARTITIONS_LEVEL, METADATA_VERSION, TOPIC_USERS_LEVEL
from raftmeta.image import MetadataImage
from raftmeta.port import Change
from raftmeta.quorum.image_feed import ChangeHistory
from raftmeta.replay import image_from_records, replay, replay_all
from raftmeta.state import (
    ALTERATION_BYTES,
    ERROR_BYTES,
    OUTCOME_BYTES,
    REFUSED_ALTERATION_BYTES,
    SESSION_BYTES,
    Applied,
    ClientSessions,
    MetadataState,
)
from tests.support.fresh import examples
from tests.support.metadata import (
    alter,
    claim,
    create_partitions,
    create_topic,
    image_after,
    register,
    unfence,
    update_feature,
    uuid_of,
)
from tests.support.metadata_histories import Step, live, lives, security_lives

CLIENT = uuid_of(77)


def apply(state: MetadataState, command: MetadataCommand, term: int = 1) -> Applied:
    return state.apply(state.last_applied + 1, term, command.SerializeToString())


def ready() -> MetadataState:
    """Return a state with one broker that is up; three entries, after the leader's first one."""
    state = MetadataState()
    state.begin_term(1, 1)
    for command in (claim(), register(1), unfence(1, 3)):
        assert isinstance(apply(state, command).outcome, CommandResult)
    return state


def asked(command: MetadataCommand, sequence: int, settled_below: int = 0) -> MetadataCommand:
    command.client_id, command.sequence, command.settled_below = CLIENT, sequence, settled_below
    return command


def restored(state: MetadataState) -> MetadataState:
    return restored_at(state, 1)


def restored_at(state: MetadataState, term: int) -> MetadataState:
    copy = MetadataState()
    copy.restore(state.encode(state.capture()), state.last_applied, term)
    return copy


def digest(state: MetadataState) -> StateDigestCommand:
    command = state.digest_command()
    assert command is not None
    return command


# Fencing


def test_a_command_counts_only_in_the_term_that_it_was_proposed_in() -> None:
    state = ready()
    before = state.image
    for epoch, term in ((1, 2), (2, 2), (0, 1), (2, 1)):
        applied = apply(state, create_topic("a", 1, epoch=epoch), term)
        assert isinstance(applied.outcome, FencedController)
        assert applied.change is None
    assert state.image is before


def test_a_late_command_of_a_deposed_controller_changes_nothing_and_may_be_asked_again() -> None:
    state = ready()
    assert isinstance(apply(state, asked(create_topic("a", 1), 0), term=2).outcome, FencedController)
    assert isinstance(apply(state, claim(epoch=2, controller_id=2), term=2).outcome, CommandResult)
    assert isinstance(apply(state, asked(create_topic("a", 1), 0), term=2).outcome, FencedController)
    applied = apply(state, asked(create_topic("a", 1, epoch=2), 0), term=2)
    assert isinstance(applied.outcome, CommandResult)
    assert state.image.offset == state.last_applied


def test_a_claim_is_of_its_own_term() -> None:
    assert isinstance(apply(ready(), claim(epoch=3), term=2).outcome, FencedController)


# Retries


@pytest.mark.parametrize("after_snapshot", [False, True])
def test_a_retry_gets_the_first_answer(after_snapshot: bool) -> None:
    state = ready()
    first = apply(state, asked(create_topic("a", 1), 0)).outcome
    refused = apply(state, asked(create_topic("a", 2), 1)).outcome
    assert isinstance(refused, TopicAlreadyExists)
    if after_snapshot:
        state = restored(state)
    before = state.image
    assert apply(state, asked(create_topic("a", 1), 0)) == Applied(first, None)
    again = apply(state, asked(create_topic("a", 2), 1)).outcome
    assert (type(again), str(again)) == (type(refused), str(refused))
    assert state.image is before


def test_what_is_settled_is_never_done_again() -> None:
    state = ready()
    apply(state, asked(create_topic("a", 1), 0))
    apply(state, asked(create_topic("b", 2), 1, settled_below=1))
    late = apply(state, asked(create_topic("c", 3), 0))
    assert isinstance(late.outcome, RequestTimedOut), "the retry must time out, as the first answer is forgotten"
    assert "settled" in str(late.outcome)


def test_commands_without_a_client_are_never_taken_for_retries() -> None:
    state = ready()
    assert isinstance(apply(state, create_topic("a", 1)).outcome, CommandResult)
    assert isinstance(apply(state, create_topic("b", 2)).outcome, CommandResult)
    assert isinstance(apply(state, create_topic("b", 3)).outcome, TopicAlreadyExists)


def test_sessions_are_bounded_and_the_longest_silent_goes_first() -> None:
    sessions = ClientSessions(max_clients=2, max_outcomes_per_client=2)

    def command(client: int, sequence: int = 0) -> MetadataCommand:
        return MetadataCommand(client_id=uuid_of(client), sequence=sequence)

    for index, client in enumerate((1, 2), 1):
        sessions.answer(index, command(client), CommandResult(index))
    assert sessions.answered(3, command(1)) == CommandResult(1)
    sessions.answer(4, command(3), CommandResult(4))
    assert len(sessions) == 2
    assert sessions.answered(5, command(2)) is None
    assert sessions.answered(6, command(1)) == CommandResult(1)
    for sequence in (1, 2):
        sessions.answer(6 + sequence, command(1, sequence), CommandResult(6 + sequence))
    assert isinstance(sessions.answered(9, command(1, 0)), RequestTimedOut), (
        "the retry must time out, as the first answer is dropped, and must not be applied again"
    )
    assert sessions.answered(10, command(1, 1)) == CommandResult(7)
    copy = ClientSessions(max_clients=2)
    copy.restore(ClientSession.FromString(each.SerializeToString()) for each in sessions.capture().to_wire())
    assert list(copy.capture().to_wire()) == list(sessions.capture().to_wire())


def test_what_is_kept_is_bounded_in_bytes_and_replicas_forget_the_same() -> None:
    limit = 3 * (SESSION_BYTES + 4 * ERROR_BYTES)
    sessions, other = ClientSessions(max_kept_bytes=limit), ClientSessions(max_kept_bytes=limit)
    index = 0
    for sequence in range(40):
        for client in range(5):
            index += 1
            command = MetadataCommand(client_id=uuid_of(client + 1), sequence=sequence)
            for each, words in ((sessions, "é" * 100_000), (other, "no")):
                assert each.answered(index, command) is None
                each.answer(index, command, TopicAlreadyExists(words))
                assert each.kept_bytes <= limit
            if index % 7 == 0:
                copy = ClientSessions(max_kept_bytes=limit)
                copy.restore(sessions.capture().to_wire())
                assert copy.kept_bytes == sessions.kept_bytes
                sessions = copy
            kept, same = (
                [(s.client_id, s.settled_below, set(s.outcomes)) for s in each.capture().to_wire()]
                for each in (sessions, other)
            )
            assert kept == same
    assert sum(wire.ByteSize() for wire in sessions.capture().to_wire()) <= limit


def test_one_client_alone_stays_within_the_bytes() -> None:
    sessions = ClientSessions(max_kept_bytes=SESSION_BYTES + 3 * OUTCOME_BYTES)
    for index, sequence in enumerate((*range(9), 2**63 - 1), 1):
        sessions.answer(index, MetadataCommand(client_id=uuid_of(1), sequence=sequence), CommandResult(index))
    (wire,) = sessions.capture().to_wire()
    assert sorted(wire.outcomes) == [7, 8, 2**63 - 1]
    assert wire.settled_below == 7


@pytest.mark.parametrize(
    "outcome",
    [
        CommandResult(7, topic_id=uuid_of(1), broker_epoch=3, first_producer_id=1000, producer_ids=1000),
        CommandResult(0),
        TopicAlreadyExists("there"),
        CommandResult(
            7,
            alterations=(
                AlterationOutcome(partition_epoch=4),
                AlterationOutcome(error=Error(code=INVALID_UPDATE_VERSION, message="newer"), partition_epoch=-1),
            ),
        ),
    ],
)
def test_outcomes_travel(outcome: CommandResult | RaftlogError) -> None:
    back = outcome_from_wire(outcome_to_wire(outcome))
    assert (type(back), str(back)) == (type(outcome), str(outcome))


def batch_answer(refused: int, granted: int, words: str = "no") -> CommandResult:
    """Return the answer to a batch of ISR changes."""
    error = Error(code=INVALID_UPDATE_VERSION, message=words)
    outcomes = [AlterationOutcome(error=error)] * refused + [AlterationOutcome(partition_epoch=5)] * granted
    return CommandResult(1, alterations=tuple(outcomes))


def test_the_answers_to_a_batch_count_alike_however_they_are_worded() -> None:
    kept = []
    for words in ("no", "é" * MAX_ALTERATION_ERROR_CHARACTERS):
        sessions = ClientSessions()
        command = MetadataCommand(client_id=uuid_of(1), sequence=1)
        sessions.answer(1, command, batch_answer(3, 2, words))
        kept.append(sessions.kept_bytes)
        copy = ClientSessions()
        copy.restore(sessions.capture().to_wire())
        assert copy.kept_bytes == sessions.kept_bytes
        assert sum(wire.ByteSize() for wire in sessions.capture().to_wire()) <= sessions.kept_bytes
        assert sessions.answered(2, command) == batch_answer(3, 2, words)
    assert kept == [SESSION_BYTES + OUTCOME_BYTES + 3 * REFUSED_ALTERATION_BYTES + 2 * ALTERATION_BYTES] * 2


def test_a_retry_of_a_batch_gets_the_first_answer_and_changes_nothing_again() -> None:
    """Its first attempt was committed, and a second one comes through the next controller."""
    state = ready()
    apply(state, update_feature(METADATA_VERSION, ALTER_PARTITIONS_LEVEL))
    assert isinstance(apply(state, create_topic("a", 1, 2, 1)).outcome, CommandResult)
    (topic,) = state.image.topics.values()
    members = [IsrMember(broker_id=1, broker_epoch=3)]
    alterations = [
        PartitionAlteration(topic_id=topic.topic_id, partition=0, new_isr=members),
        PartitionAlteration(topic_id=topic.topic_id, partition=1, partition_epoch=9, new_isr=members),
    ]
    command = AlterPartitionsCommand(broker_id=1, broker_epoch=3, alterations=alterations)
    batch = asked(MetadataCommand(controller_epoch=1, alter_partitions=command), 0)
    first = apply(state, batch).outcome
    assert isinstance(first, CommandResult)
    assert [each.error.code for each in first.alterations] == [0, INVALID_UPDATE_VERSION]
    apply(state, claim(2, 2), 2)
    state = restored_at(state, 2)
    batch.controller_epoch = 2
    again = apply(state, batch, 2)
    assert again.outcome == first
    assert again.change is None


def test_the_digest_covers_which_changes_of_a_batch_were_refused() -> None:
    """Replicas that refuse different ones have diverged, whether or not any of them changed something."""
    digests = set()
    for epochs in ((0, 0), (9, 0), (0, 9), (9, 9)):
        state = ready()
        apply(state, update_feature(METADATA_VERSION, ALTER_PARTITIONS_LEVEL))
        apply(state, create_topic("a", 1, 2, 1))
        (topic,) = state.image.topics.values()
        command = AlterPartitionsCommand(broker_id=1, broker_epoch=3)
        for number, epoch in enumerate(epochs):
            members = [IsrMember(broker_id=1, broker_epoch=3)]
            command.alterations.add(topic_id=topic.topic_id, partition=number, partition_epoch=epoch, new_isr=members)
        assert apply(state, MetadataCommand(controller_epoch=1, alter_partitions=command)).change is None
        digests.add(state.capture().digest)
    assert len(digests) == 4


def test_an_error_travels_and_rests_with_a_bounded_text() -> None:
    wire = outcome_to_wire(TopicAlreadyExists("\x01" * 1_000_000))
    assert len(wire.error.message) == MAX_ERROR_CHARACTERS
    state = ready()
    apply(state, asked(MetadataCommand(delete_topic=DeleteTopicCommand(name="\x01" * 1_000_000)), 0))
    assert len(state.encode(state.capture())) < 3_000


# What ends the node


def test_what_is_not_understood_ends_the_node() -> None:
    with pytest.raises(CorruptRecordError, match="entry 5 is no command"):
        ready().apply(5, 1, b"\xff\xff")
    unknown = MetadataCommand(controller_epoch=1).SerializeToString() + b"\xfa\x07\x00"
    with pytest.raises(UnsupportedVersion, match="run that one or newer"):
        ready().apply(5, 1, unknown)


def test_a_feature_level_that_this_version_does_not_know_ends_the_node() -> None:
    state = MetadataState()
    for command in (claim(), register(1, features={"x": (1, 2)})):
        apply(state, command)
    with pytest.raises(UnsupportedVersion, match="uses x at level 2"):
        apply(state, update_feature("x", 2))


def test_a_replica_that_has_diverged_stops() -> None:
    leader, follower, other = ready(), ready(), ready()
    for state, name in ((leader, "a"), (follower, "a"), (other, "b")):
        apply(state, create_topic(name, 1))
    check = MetadataCommand(controller_epoch=1, state_digest=digest(leader))
    assert apply(leader, check).change is None
    apply(follower, check)
    assert digest(follower) == digest(leader)
    with pytest.raises(CorruptRecordError, match="not what the controller has: at index 5"):
        apply(other, check)


def test_a_digest_of_before_the_snapshot_is_not_compared() -> None:
    state = ready()
    check = MetadataCommand(controller_epoch=1, state_digest=StateDigestCommand(log_index=2, digest=b"x" * 16))
    assert apply(restored(state), check).change is None


def test_entries_come_in_order() -> None:
    with pytest.raises(AssertionError):
        ready().apply(4, 1, claim().SerializeToString())


# Listeners


def test_listeners_see_changes_and_resets() -> None:
    state = ready()
    seen: list[tuple[MetadataImage, Change | None]] = []
    unsubscribe = state.subscribe(
        lambda image, change: seen.append((image, change)), lambda image: seen.append((image, None))
    )
    applied = apply(state, create_topic("a", 1))
    apply(state, create_topic("a", 1))
    assert seen == [(state.image, applied.change)]
    assert applied.change is not None
    assert applied.change.offset == state.image.offset == 5
    state.restore(state.encode(state.capture()), state.last_applied, 1)
    assert seen[1:] == [(state.image, None)]
    unsubscribe()
    apply(state, create_topic("b", 2))
    assert len(seen) == 2


# Snapshots


@settings(max_examples=examples(0.6))
@given(st.one_of(lives, security_lives), st.integers(0, 40), st.lists(st.booleans(), min_size=1, max_size=5))
def test_replicas_agree_whether_they_came_by_the_log_or_by_a_snapshot(
    life: list[tuple[Step, int, int]], at: int, with_client: list[bool]
) -> None:
    """Equal states have equal bytes and digests, and go on to decide the same."""
    first, second = MetadataState(), MetadataState()
    for number, event in enumerate(live(life)):
        command = MetadataCommand.FromString(event.command.SerializeToString())
        if with_client[number % len(with_client)]:
            asked(command, number // 2, max(0, number // 2 - 3))
        if command.WhichOneof("command") is None:
            continue
        if number == at:
            data = first.encode(first.capture())
            second = restored(second)
            assert second.encode(second.capture()) == data
        results = []
        for state in (first, second):
            try:
                results.append(str(state.apply(event.offset, 1, command.SerializeToString())))
            except UnsupportedVersion as error:
                results.append(str(error))
        assert results[0] == results[1]
    assert first.image == second.image
    assert first.encode(first.capture()) == second.encode(second.capture())


def test_a_capture_does_not_change() -> None:
    state = ready()
    apply(state, asked(create_topic("a", 1), 0))
    captured = state.capture()
    data = state.encode(captured)
    apply(state, asked(create_topic("b", 2), 1))
    assert state.encode(captured) == data


def bad(**changes: object) -> bytes:
    state = ready()
    snapshot = MetadataSnapshot.FromString(state.encode(state.capture()))
    for name, value in changes.items():
        setattr(snapshot, name, value)
    return snapshot.SerializeToString()


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"\xff", CorruptRecordError, "does not parse"),
        (bad(format=2), UnsupportedVersion, "has format 2, this version reads 1"),
        (bad(log_index=3), CorruptRecordError, "says it is of index 3"),
        (bad(image_offset=9), CorruptRecordError, "offset 9"),
        (bad(digest=b""), CorruptRecordError, "a digest of 0 bytes"),
    ],
)
def test_a_bad_snapshot_is_refused_and_the_state_stays(data: bytes, error: type[RaftlogError], words: str) -> None:
    state = ready()
    before = state.image
    with pytest.raises(error, match=words):
        state.restore(data, 4, 1)
    assert state.image is before


def test_a_snapshot_that_contradicts_itself_is_refused() -> None:
    """A snapshot of a failed load would make the loss permanent (KAFKA-14203)."""
    state = ready()
    apply(state, create_topic("a", 1))
    snapshot = MetadataSnapshot.FromString(state.encode(state.capture()))
    topic = next(number for number, record in enumerate(snapshot.records) if record.HasField("topic"))
    del snapshot.records[topic]
    with pytest.raises(CorruptRecordError, match="contradicts itself"):
        MetadataState().restore(snapshot.SerializeToString(), 5, 1)


@given(st.one_of(lives, security_lives))
def test_one_by_one_and_all_at_once_are_the_same(life: list[tuple[Step, int, int]]) -> None:
    for event in live(life):
        step = event.before
        for record in event.decision.records:
            step = replay(step, record, event.offset)
        assert step == event.after


def test_the_bytes_of_a_snapshot_do_not_depend_on_the_order_of_events() -> None:
    first = image_after(
        claim(), register(1), create_topic("a", 1), create_topic("b", 2), alter("b", {"segment.ms": "1"})
    )
    second = image_after(claim(), register(1), create_topic("b", 2, configs={"segment.ms": "1"}), create_topic("a", 1))
    serialized = [
        [record.SerializeToString(deterministic=True) for record in image.to_records()] for image in (first, second)
    ]
    assert serialized[0] == serialized[1]


def test_an_old_image_does_not_change() -> None:
    old = image_after(claim(), register(), create_topic("a", 1, 2, configs={"segment.ms": "1"}))
    copy = image_from_records(old.to_records(), old.offset)
    for command in (create_topic("b", 2), alter("a", {"segment.ms": "2"}), register(incarnation=2), register(7)):
        replay_all(old, decide(old, command).records, old.offset + 1)
    assert old == copy


def test_a_record_of_an_unknown_kind_stops_the_load() -> None:
    unknown = MetadataRecord.FromString(b"\xfa\x07\x00")  # field 127, which a later version may have
    with pytest.raises(UnsupportedVersion, match="written by a newer version"):
        replay(MetadataImage(), unknown, 1)


def test_metadata_never_goes_back() -> None:
    image = image_after(claim(), register())
    with pytest.raises(AssertionError, match="metadata goes forward"):
        replay_all(image, (), image.offset - 1)


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 8),
)
def test_it_returns_exactly_what_is_above_an_offset_or_nothing(
    start: int, steps: list[tuple[int, int]], max_changes: int, max_records: int
) -> None:
    """Offsets have gaps: entries of the log that changed nothing."""
    history = ChangeHistory(start, max_changes=max_changes, max_records=max_records)
    added: list[Change] = []
    end = start
    for gap, size in steps:
        end += gap
        added.append(Change(end, 1, [MetadataRecord()] * size))
        history.add(added[-1])
        assert history.end_offset == end
        kept = [known for offset in range(end) if (known := history.since(offset)) is not None]
        longest = kept[0] if kept else []
        assert len(longest) <= max_changes
        assert sum(len(known.records) for known in longest) <= max_records or len(longest) == 1
    assert history.since(end) == []
    assert history.since(end + 1) == [], "a watcher that is ahead must get nothing"
    for offset in range(-1, end):
        since = history.since(offset)
        assert since is None or since == [change for change in added if change.offset > offset]
        if offset < start:
            assert since is None


def test_the_newest_change_is_kept_however_large_it_is() -> None:
    history = ChangeHistory(0, max_records=1)
    history.add(Change(1, 1, [MetadataRecord()] * 5))
    assert history.since(0) is not None


@pytest.mark.parametrize("offset", [4, 5])
def test_the_history_never_goes_back(offset: int) -> None:
    with pytest.raises(AssertionError):
        ChangeHistory(5).add(Change(offset, 1, []))


def test_a_topic_keeps_the_user_that_has_made_it() -> None:
    """Through whatever changes it, and through snapshots; a retry by another user changes nothing."""
    state = ready()
    apply(state, update_feature(METADATA_VERSION, TOPIC_USERS_LEVEL))
    assert isinstance(apply(state, create_topic("a", 1, 2, 1, user="User:alice")).outcome, CommandResult)
    assert isinstance(apply(state, create_topic("a", 1, 2, 1, user="User:bob")).outcome, CommandResult)
    for change in (create_partitions("a", 3), alter("a", {"retention.ms": "5"})):
        assert isinstance(apply(state, change).outcome, CommandResult)
        (topic,) = state.image.topics.values()
        assert topic.user == "User:alice"
        (topic,) = restored(state).image.topics.values()
        assert topic.user == "User:alice"
    assert (len(topic.partitions), topic.configs["retention.ms"]) == (3, "5")


def test_below_its_level_no_topic_keeps_its_user() -> None:
    """A controller that does not know the field would have another state after its next snapshot."""
    state = ready()
    apply(state, update_feature(METADATA_VERSION, TOPIC_USERS_LEVEL - 1))
    assert isinstance(apply(state, create_topic("a", 1, 2, 1, user="User:alice")).outcome, CommandResult)
    (topic,) = state.image.topics.values()
    assert topic.user == ""
