"""Clients that log in to brokers with authentication: every kind of client, wrong and changed passwords, restarts,
and permissions that are missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark_raftlog import DefaultSource

from raftlog import (
    AclBinding,
    AclFilter,
    AclOperation,
    Admin,
    Consumer,
    PatternType,
    Producer,
    ResourceType,
    ScramMechanism,
    StagedWriter,
    TopicPartition,
    UserScramCredential,
)
from raftlog.errors import (
    AuthenticationFailed,
    AuthorizationError,
    ClusterAuthorizationFailed,
    ElectionNotNeeded,
    GroupAuthorizationFailed,
    InvalidRequestError,
    PreferredLeaderNotAvailable,
    RaftlogError,
    ResourceNotFound,
    TopicAuthorizationFailed,
    TransactionAbortable,
    TransactionalIdAuthorizationFailed,
    UnacceptableCredential,
)
from raftlog.testing import Cluster
from tests.support.spark_query import SCHEMA
from tests.support.steady import STEADY

PATIENCE_S = 60.0
PROMPT_S = 10.0
"""Far below all timeouts of the clients."""
OLD, NEW = "Sesame, open!", "Hocus-Pocus-77"
ADA_MAY = [
    AclBinding("User:ada", operation, kind, "a-", PatternType.PREFIXED)
    for kind, operations in (
        (ResourceType.TOPIC, (AclOperation.READ, AclOperation.WRITE)),
        (ResourceType.GROUP, (AclOperation.READ,)),
        (ResourceType.TRANSACTIONAL_ID, (AclOperation.WRITE,)),
    )
    for operation in operations
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    users = {"admin": 'quoted "\\" password', "ada": OLD, "carl": OLD}
    config: dict[str, str | int] = {**STEADY, "authorizer": "acl", "super.users": "User:admin"}
    with Cluster(3, users=users, config=config) as made:
        with _admin(made) as admin:
            for topic in ("a-1", "a-2", "theirs"):
                admin.create_topic(topic, partitions=3, replication_factor=3)
            admin.create_acls(ADA_MAY)
        _everywhere(made, lambda admin: len(admin.describe_acls()) == len(ADA_MAY))
        yield made


def _admin(cluster: Cluster) -> Admin:
    return Admin(cluster.bootstrap, config=cluster.client_config)


def _everywhere(cluster: Cluster, condition: Callable[[Admin], bool]) -> None:
    """Wait until every broker, asked separately, agrees."""
    for address in cluster.bootstrap.split(","):
        with Admin(address, config=cluster.client_config) as admin:
            _eventually(lambda admin=admin: condition(admin))  # type: ignore[misc] # bound at once


def _eventually(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"the condition does not hold after {PATIENCE_S:g} s"
        time.sleep(0.05)
    return found


def _read(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline_s:
        found += [record.value or b"" for record in consumer.poll(0.5)]
    return found


def _begin(consumer: Consumer) -> None:
    """Wait until the group has given this member all three partitions: what is sent from now on it reads."""

    def placed() -> bool:
        assert consumer.poll(0.05) == [], "a record came before any was sent"
        with suppress(InvalidRequestError):  # one has no position yet
            return len([consumer.position(part) for part in consumer.assignment()]) == 3
        return False

    _eventually(placed)


class _User:
    """A user whose password is in a file, as clients are told it."""

    def __init__(self, cluster: Cluster, name: str, file: Path) -> None:
        self._cluster, self.name, self.file = cluster, name, file
        self.config = cluster.client_config_of(name, "")
        del self.config["sasl.password"]
        self.config["sasl.password.location"] = str(file)

    def create(self, password: str) -> None:
        self.file.write_text(f"{password}\n")
        self.change(password)

    def change(self, password: str) -> None:
        with _admin(self._cluster) as admin:
            admin.alter_user(self.name, password)


@pytest.fixture
def bob(cluster: Cluster, tmp_path: Path) -> Iterator[_User]:
    """May do with `a-1` what ada may, and in groups whose names begin with `a-bob`."""
    user = _User(cluster, "bob", tmp_path / "password")
    user.create(OLD)
    needed = [
        (AclOperation.READ, ResourceType.TOPIC, "a-1", PatternType.LITERAL),
        (AclOperation.WRITE, ResourceType.TOPIC, "a-1", PatternType.LITERAL),
        (AclOperation.READ, ResourceType.GROUP, "a-bob", PatternType.PREFIXED),
    ]
    with _admin(cluster) as admin:
        admin.create_acls([AclBinding("User:bob", *each) for each in needed])
        _everywhere(cluster, lambda one: len(one.describe_acls(AclFilter("User:bob"))) == len(needed))
        yield user
        admin.delete_acls(AclFilter("User:bob"))
        with suppress(ResourceNotFound):
            admin.delete_user("bob")


def test_every_kind_of_client_logs_in(cluster: Cluster) -> None:
    config = cluster.client_config_of("ada")
    sent = [b"%d" % number for number in range(30)]
    with Producer(cluster.bootstrap, config=config) as producer:
        for number, value in enumerate(sent[:10]):
            producer.send("a-2", value, partition=number % 3)
    with Producer(cluster.bootstrap, transactional_id="a-tx", config=config) as producer, producer.transaction():
        for number, value in enumerate(sent[10:20]):
            producer.send("a-2", value, partition=number % 3)
        producer.send_offsets_to_transaction({TopicPartition("a-2", 0): 0}, "a-others")
    with StagedWriter(cluster.bootstrap, "a-sink", config=config) as writer:
        with writer.stage(1) as stage:
            for value in sent[20:]:
                stage.send("a-2", value)
            token = stage.finish()
        writer.commit(1, [token])
    with Consumer(cluster.bootstrap, group_id="a-g", auto_offset_reset="earliest", config=config) as consumer:
        consumer.subscribe("a-2")
        assert sorted(_read(consumer, len(sent)), key=int) == sent
        consumer.commit()
    with Admin(cluster.bootstrap, config=config) as admin:
        assert admin.list_topics() == ["a-1", "a-2"]


def test_users_and_permissions_are_administered(cluster: Cluster) -> None:
    with _admin(cluster) as admin:
        admin.alter_user("eve", OLD, "SCRAM-SHA-256", iterations=4096)
        admin.alter_user("eve", OLD)
        both = [
            UserScramCredential("eve", ScramMechanism.SCRAM_SHA_256, 4096),
            UserScramCredential("eve", ScramMechanism.SCRAM_SHA_512, 8192),
        ]
        assert admin.describe_users("eve") == both
        admin.alter_user("eve", OLD, only=True)
        assert admin.describe_users(["eve", "nobody"]) == both[1:]
        admin.delete_user("eve", "SCRAM-SHA-512")
        with pytest.raises(ResourceNotFound):
            admin.delete_user("eve")
        for password, iterations in (("", 8192), ("x", 4095), ("a\u0007b", 8192)):
            with pytest.raises(UnacceptableCredential, match="'eve'"):
                admin.alter_user("eve", password, iterations=iterations)
        one = AclBinding("User:eve", AclOperation.READ, ResourceType.TOPIC, "x")
        two = AclBinding("User:eve", AclOperation.ALTER, ResourceType.CLUSTER, "raftlog-cluster", host="10.0.0.1")
        admin.create_acls([one, two])
        assert set(admin.describe_acls(AclFilter("User:eve"))) == {one, two}
        assert admin.delete_acls(AclFilter("User:eve", AclOperation.READ), validate_only=True) == [one]
        filters = [AclFilter("User:eve", host="10.0.0.1"), AclFilter("User:eve", resource_name="x")]
        assert set(admin.delete_acls(filters)) == {one, two}
        assert admin.describe_acls(AclFilter("User:eve")) == []
    with Admin(cluster.bootstrap, config=cluster.client_config_of("ada")) as ada:
        for refused in (
            lambda: ada.create_acls(one),
            ada.describe_acls,
            lambda: ada.delete_acls(AclFilter()),
            lambda: ada.alter_user("eve", NEW),
            lambda: ada.delete_user("eve"),
            ada.describe_users,
        ):
            with pytest.raises(ClusterAuthorizationFailed):
                refused()


def _clients(cluster: Cluster, config: dict[str, str]) -> dict[str, Callable[[], object]]:
    """What each kind of client does first."""

    def produce(**options: Any) -> None:
        with Producer(cluster.bootstrap, config=config, **options) as producer:
            if options.get("transactional_id"):
                producer.init_transactions()
            producer.send("a-1", b"x").result(timeout=PATIENCE_S)

    def consume(**options: Any) -> None:
        with Consumer(cluster.bootstrap, config=config, **options) as consumer:
            consumer.subscribe("a-1")

    def administer() -> None:
        with Admin(cluster.bootstrap, config=config) as admin:
            admin.describe_cluster()

    def stage() -> None:
        with StagedWriter(cluster.bootstrap, "a-sink", config=config) as writer:
            writer.last_batch()

    return {
        "producer": produce,
        "producer without idempotence": lambda: produce(enable_idempotence=False),
        "transactions": lambda: produce(transactional_id="a-tx"),
        "consumer": consume,
        "group": lambda: consume(group_id="a-g"),
        "admin": administer,
        "stages": stage,
    }


@pytest.mark.parametrize("user", ["carl", "nobody"])  # a user with many failures is kept out for a minute
def test_a_wrong_password_is_said_at_once_by_every_client(
    cluster: Cluster, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "raftlog")
    for kind, begin in _clients(cluster, cluster.client_config_of(user, NEW)).items():
        begun_s = time.monotonic()
        with pytest.raises(AuthenticationFailed, match=rf"127\.0\.0\.1:\d+ does not let user '{user}' in") as caught:
            begin()
        assert time.monotonic() - begun_s < PROMPT_S, kind
        assert NEW not in str(caught.value)
    assert NEW not in caplog.text


def test_a_changed_password_is_read_from_its_file_and_clients_go_on(cluster: Cluster, bob: _User) -> None:
    with (
        Producer(cluster.bootstrap, config=bob.config) as producer,
        Consumer(cluster.bootstrap, group_id="a-bob-1", config=bob.config) as consumer,
    ):
        consumer.subscribe("a-1")
        _begin(consumer)
        for number in range(3):
            producer.send("a-1", b"before", partition=number).result(timeout=PATIENCE_S)
        assert _read(consumer, 3) == [b"before"] * 3
        bob.file.write_text(NEW)
        bob.change(NEW)
        for number in range(9):
            producer.send("a-1", b"after", partition=number % 3).result(timeout=PATIENCE_S)
        assert _read(consumer, 9) == [b"after"] * 9
        consumer.commit()


def test_who_keeps_the_old_password_is_put_out_and_told(cluster: Cluster, bob: _User) -> None:
    with (
        Producer(cluster.bootstrap, config=bob.config) as producer,
        Consumer(cluster.bootstrap, group_id="a-bob-2", config=bob.config) as member,
        Consumer(cluster.bootstrap, config=bob.config) as reader,
    ):
        producer.send("a-1", b"before").result(timeout=PATIENCE_S)
        member.subscribe("a-1")
        reader.subscribe("a-1")
        bob.change(NEW)
        for client in (member, reader):
            with pytest.raises(AuthenticationFailed, match="does not let user 'bob' in"):
                _eventually(lambda client=client: client.poll(0.5) and False)  # type: ignore[misc] # bound at once
        begun_s = time.monotonic()
        with pytest.raises(AuthenticationFailed):
            while time.monotonic() - begun_s < PATIENCE_S:  # a broker may take one more before it has heard
                producer.send("a-1", b"after").result(timeout=PATIENCE_S)
        bob.file.write_text(NEW)
        assert _eventually(lambda: _delivered(producer)), "the producer must deliver again once it has the new password"
        assert _eventually(lambda: _delivered(producer) and _polled(reader))
        assert _eventually(lambda: _delivered(producer) and _polled(member))


def _delivered(producer: Producer) -> bool:
    try:
        producer.send("a-1", b"again").result(timeout=PATIENCE_S)
    except AuthenticationFailed:
        return False
    return True


def _polled(consumer: Consumer) -> list[Any]:
    with suppress(AuthenticationFailed):
        return consumer.poll(0.5)
    return []


def test_a_user_that_is_deleted_is_put_out(cluster: Cluster, bob: _User) -> None:
    with Consumer(cluster.bootstrap, config=bob.config) as reader, _admin(cluster) as admin:
        reader.subscribe("a-1")
        admin.delete_user("bob")
        with pytest.raises(AuthenticationFailed):
            _eventually(lambda: reader.poll(0.5) and False)


def test_a_broker_that_restarts_is_logged_in_to_again(cluster: Cluster, bob: _User) -> None:
    with (
        Producer(cluster.bootstrap, config=bob.config) as producer,
        Consumer(cluster.bootstrap, group_id="a-bob-3", config=bob.config) as consumer,
    ):
        consumer.subscribe("a-1")
        _begin(consumer)
        with _admin(cluster) as admin:
            restarted = admin.describe_topic("a-1").partitions[0].replicas[0]
            cluster.stop(restarted)
            cluster.start(restarted)

            def leads_again() -> bool:
                with suppress(PreferredLeaderNotAvailable, ElectionNotNeeded):
                    admin.elect_leaders("a-1", [0])
                return admin.describe_topic("a-1").partitions[0].leader == restarted

            _eventually(leads_again)
        sent = [b"%d" % number for number in range(6)]
        for number, value in enumerate(sent):
            producer.send("a-1", value, partition=number % 3)
        producer.flush(timeout=PATIENCE_S)
        assert sorted(_read(consumer, len(sent))) == sent
        consumer.commit()


# Permissions


@contextmanager
def _allowed(cluster: Cluster, operation: AclOperation) -> Iterator[None]:
    """Let ada do this with the topic `theirs` meanwhile."""
    binding = AclBinding("User:ada", operation, ResourceType.TOPIC, "theirs")
    with _admin(cluster) as admin:
        admin.create_acls(binding)
        try:
            _everywhere(cluster, lambda one: binding in one.describe_acls())
            yield
        finally:
            admin.delete_acls(AclFilter(resource_name="theirs"))
            _everywhere(cluster, lambda one: binding not in one.describe_acls())


def test_only_the_topic_fails_that_may_not_be_written(cluster: Cluster) -> None:
    config = cluster.client_config_of("ada")
    with Producer(cluster.bootstrap, config=config) as producer:
        begun_s = time.monotonic()
        with pytest.raises(TopicAuthorizationFailed, match="User:ada may not DESCRIBE topic 'theirs'; raftlog acl add"):
            producer.send("theirs", b"x").result(timeout=PATIENCE_S)
        assert time.monotonic() - begun_s < PROMPT_S
        producer.send("a-2", b"x").result(timeout=PATIENCE_S)
        with (
            _allowed(cluster, AclOperation.DESCRIBE),
            pytest.raises(TopicAuthorizationFailed, match="User:ada may not WRITE to topic 'theirs'"),
        ):
            producer.send("theirs", b"x").result(timeout=PATIENCE_S)
        producer.send("a-2", b"x").result(timeout=PATIENCE_S)


def test_only_the_topic_fails_that_may_not_be_read_any_more(cluster: Cluster) -> None:
    config = cluster.client_config_of("ada")
    with (
        Producer(cluster.bootstrap, config=cluster.client_config) as producer,
        Consumer(cluster.bootstrap, config=config, metadata_max_age_ms=500) as consumer,
    ):
        with pytest.raises(TopicAuthorizationFailed, match="'theirs'"):
            consumer.subscribe(["a-2", "theirs"])
        assert {part.topic for part in consumer.assignment()} == {"a-2"}, (
            "the topic that the user may read must be subscribed all the same"
        )
        with _allowed(cluster, AclOperation.READ):
            _eventually(lambda: {part.topic for part in consumer.assignment()} == {"a-2", "theirs"})
            producer.send("theirs", b"theirs").result(timeout=PATIENCE_S)
            assert _read(consumer, 1) == [b"theirs"]
        with pytest.raises(TopicAuthorizationFailed, match="'theirs'"):
            _eventually(lambda: consumer.poll(0.5) and False)
        producer.send("a-2", b"ours").result(timeout=PATIENCE_S)
        found: list[bytes] = []

        def ours() -> bool:
            with suppress(TopicAuthorizationFailed):
                found.extend(record.value or b"" for record in consumer.poll(0.5))
            return bool(found)

        _eventually(ours)
        assert found == [b"ours"]


def test_groups_and_transactional_ids_of_others_are_refused_at_once(cluster: Cluster) -> None:
    config = cluster.client_config_of("ada")
    cases: list[tuple[type[AuthorizationError], Callable[[], object]]] = []
    with (
        Consumer(cluster.bootstrap, group_id="theirs", config=config) as consumer,
        Producer(cluster.bootstrap, transactional_id="theirs", config=config) as producer,
        StagedWriter(cluster.bootstrap, "theirs", config=config) as writer,
        Admin(cluster.bootstrap, config=config) as admin,
    ):
        cases = [
            (GroupAuthorizationFailed, lambda: consumer.subscribe("a-1")),
            (GroupAuthorizationFailed, lambda: consumer.committed([TopicPartition("a-1", 0)])),
            (TransactionalIdAuthorizationFailed, producer.init_transactions),
            (TransactionalIdAuthorizationFailed, writer.last_batch),
            (TopicAuthorizationFailed, lambda: admin.describe_topic("theirs")),
            (ClusterAuthorizationFailed, lambda: admin.describe_quorum()),
            (AuthorizationError, lambda: admin.create_topic("theirs-too")),
        ]
        for kind, act in cases:
            begun_s = time.monotonic()
            with pytest.raises(kind, match="User:ada may not"):
                act()
            assert time.monotonic() - begun_s < PROMPT_S


def test_a_member_that_was_refused_goes_on_once_it_may(cluster: Cluster) -> None:
    config = cluster.client_config_of("ada")
    with Consumer(cluster.bootstrap, group_id="later", config=config) as consumer, _admin(cluster) as admin:
        with pytest.raises(GroupAuthorizationFailed, match="User:ada may not"):
            consumer.subscribe("a-1")
        with pytest.raises(GroupAuthorizationFailed, match="User:ada may not"):
            consumer.poll(PROMPT_S)
        admin.create_acls(AclBinding("User:ada", AclOperation.READ, ResourceType.GROUP, "later"))

        def reads() -> bool:
            with suppress(GroupAuthorizationFailed):
                consumer.poll(0.1)
            return len(consumer.assignment()) == 3

        try:
            _eventually(reads)
            consumer.commit({TopicPartition("a-1", 0): 0})
        finally:
            admin.delete_acls(AclFilter(resource_name="later"))


def test_a_transaction_with_a_topic_of_others_can_be_aborted_and_the_next_one_succeeds(cluster: Cluster) -> None:
    config = cluster.client_config_of("ada")
    with (
        _allowed(cluster, AclOperation.DESCRIBE),
        Producer(cluster.bootstrap, transactional_id="a-tx2", config=config) as producer,
    ):
        producer.begin_transaction()
        producer.send("a-2", b"x")
        with pytest.raises(RaftlogError, match="User:ada may not WRITE to topic 'theirs'"):
            producer.send("theirs", b"x").result(timeout=PATIENCE_S)
        with pytest.raises(TransactionAbortable, match="User:ada may not WRITE to topic 'theirs'"):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send("a-2", b"x")


def test_spark_reads_and_writes_as_a_user(cluster: Cluster) -> None:
    """Exactly once with rights to the topic and the sink alone: what needs more is not asked for in vain."""
    config = {f"kafka.{name}": value for name, value in cluster.client_config_of("ada").items()}
    address = {"bootstrap.servers": cluster.bootstrap, **config}
    assert DefaultSource({**address, "topic": "a-2"}).writer(SCHEMA, overwrite=False) is not None
    with pytest.raises(TopicAuthorizationFailed, match="'theirs'"):
        DefaultSource({**address, "topic": "theirs"}).writer(SCHEMA, overwrite=False)
    with Producer(cluster.bootstrap, config=cluster.client_config) as producer:
        sent = producer.send("a-2", b"row", partition=0).result(timeout=PATIENCE_S)
    starting = f'{{"a-2": {{"0": {sent.offset}}}}}'
    source = DefaultSource({**address, "assign": '{"a-2": [0]}', "startingOffsets": starting})

    def read() -> list[bytes]:  # nothing, while a marker is missing of a transaction of before
        reader = source.reader(source.schema())
        tables: list[Any] = [table for part in reader.partitions() for table in reader.read(part)]
        return [value for table in tables for value in table.column("value").to_pylist()]

    assert _eventually(read) == [b"row"]
    refused = DefaultSource({**address, "kafka.sasl.password": NEW, "subscribe": "a-2"})
    with pytest.raises(AuthenticationFailed) as caught:
        refused.reader(refused.schema()).partitions()
    assert NEW not in str(caught.value)
