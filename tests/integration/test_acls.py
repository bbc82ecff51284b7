"""Permissions against real brokers: client certificates name the users, every call is looked at, and what is taken away
is gone on both brokers."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf import symbol_database
from google.protobuf.message_factory import GetMessageClass

from broker.security.permissions import RULES, anybody, inside
from raftlog import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermission,
    Admin,
    Consumer,
    PatternType,
    Producer,
    ResourceType,
    TopicPartition,
)
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.collect import collect
from raftlog._doctor.picture import Finding
from raftlog._doctor.report import examine
from raftlog.errors import (
    AuthorizationError,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    RaftlogError,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from raftlog.format import Attributes
from raftlog.testing import Cluster
from raftlog.v1 import (
    admin_pb2,
    common_pb2,
    group_pb2,
    log_pb2,
    metadata_pb2,
    metadata_pb2_grpc,
    node_pb2,
    security_pb2,
    security_pb2_grpc,
    transaction_pb2,
)
from tests.support.batches import batch_of
from tests.support.raw_client import RawClient
from tests.support.sasl_client import TIMEOUT_S, secure_channel
from tests.support.steady import STEADY

T = TypeVar("T")

PATIENCE_S = 90.0
MODULES = (admin_pb2, group_pb2, log_pb2, metadata_pb2, node_pb2, security_pb2, transaction_pb2)
"""Imported so that their descriptors are in the pool."""
TOPIC, GROUP, CLUSTER, TXN = (
    ResourceType.TOPIC,
    ResourceType.GROUP,
    ResourceType.CLUSTER,
    ResourceType.TRANSACTIONAL_ID,
)
READ, WRITE, DESCRIBE = AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Broker 1 is the controller; broker 2 hears of everything from its watch on the inter-node listener."""
    config: dict[str, str | int] = {**STEADY, "authorizer": "acl", "super.users": "User:admin"}
    with Cluster(2, controllers=1, tls=True, config=config, default_replication_factor=1) as made:
        yield made


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap, config=cluster.authority.client_config("admin")) as made:
        yield made


def may(user: str, operation: AclOperation, kind: ResourceType, name: str) -> AclBinding:
    return AclBinding(f"User:{user}", operation, kind, name)


def soon(work: Callable[[], T]) -> T:
    """Return what `work` returns once it may: the other broker hears of a permission a moment later."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return work()
        except RaftlogError as error:
            refused = isinstance(error, AuthorizationError) or " may not " in str(error)  # what fails a transaction
            if not refused or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def soon_refused(error: type[RaftlogError], work: Callable[[], Any], words: str = "") -> RaftlogError:
    """Return what `work` is refused with once it is with these words: a broker may miss other permissions before."""
    deadline_s = time.monotonic() + PATIENCE_S
    said: RaftlogError | None = None
    while time.monotonic() < deadline_s:
        try:
            work()
        except (error, AuthorizationError) as refusal:
            if isinstance(refusal, error) and words in str(refusal):
                return refusal
            said = refusal
        time.sleep(0.02)
    raise AssertionError(
        f"no call was refused with {error.__name__} and the words {words!r}; the last answer was {said!r}"
    )


def soon_is(wanted: T, work: Callable[[], T]) -> None:
    """Wait until `work` returns this."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := soon(work)) != wanted:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)


@contextmanager
def producer(cluster: Cluster, user: str, **options: Any) -> Iterator[Producer]:
    with Producer(cluster.bootstrap, config=cluster.authority.client_config(user), **options) as made:
        yield made


@contextmanager
def consumer(cluster: Cluster, user: str, group: str) -> Iterator[Consumer]:
    config = cluster.authority.client_config(user)
    with Consumer(cluster.bootstrap, group_id=group, auto_offset_reset="earliest", config=config) as made:
        yield made


def filled(message: Any, topic_id: bytes) -> Any:
    """Return the message with a name or a topic in every field that can have one."""
    for field in message.DESCRIPTOR.fields:
        value: Any
        if field.name in ("topic_id", "topic_ids"):
            value = topic_id
        elif field.type == field.TYPE_STRING:
            value = "theirs"
        elif field.type == field.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            value = filled(GetMessageClass(field.message_type)(), topic_id)
        else:
            continue
        if field.is_repeated:
            getattr(message, field.name).append(value)
        elif field.type == field.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message


def write(writing: Producer, topic: str, value: bytes, partition: int = 0) -> None:
    writing.send(topic, value, partition=partition).result(PATIENCE_S)


def test_nobody_gets_through_to_anything_without_permissions(cluster: Cluster, admin: Admin) -> None:
    """Every call that needs a permission, on a real listener."""
    admin.create_topic("theirs", partitions=1)
    pool = symbol_database.Default().pool  # type: ignore[attr-defined] # not in the stubs
    topic_id = admin.describe_topic("theirs").topic_id

    async def main() -> None:
        certificate = cluster.authority.issue("mallory", hosts=())
        address = cluster.bootstrap.split(",")[0]
        async with secure_channel(address, cluster.authority.ca_file, certificate) as channel:
            refused = 0
            for path, rule in RULES.items():
                if rule in (anybody, inside):
                    continue
                _, service, name = path.split("/")
                method = pool.FindServiceByName(service).methods_by_name[name]
                request = filled(GetMessageClass(method.input_type)(), topic_id)
                kind = channel.unary_stream if method.server_streaming else channel.unary_unary
                call: Any = kind(
                    path,
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=GetMessageClass(method.output_type).FromString,
                )(request, timeout=TIMEOUT_S)
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED, path
                assert "AuthorizationFailed: User:mallory may not " in await call.details(), path
                refused += 1
            assert refused > 35

    asyncio.run(main())


def test_who_may_write_writes_and_who_may_read_reads_and_nobody_else(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("orders", partitions=2)
    admin.create_acls([may("w", WRITE, TOPIC, "orders"), may("r", READ, TOPIC, "orders"), may("r", READ, GROUP, "g")])
    admin.create_acls(may("r", WRITE, TOPIC, "elsewhere"))  # so that it may have a producer id
    with producer(cluster, "w") as writing:
        for number in range(4):
            soon(partial(write, writing, "orders", b"%d" % number, number % 2))

    def write_as_reader() -> None:
        with producer(cluster, "r") as refused:
            write(refused, "orders", b"x")

    soon_refused(TopicAuthorizationFailed, write_as_reader, "--operation Write")
    with consumer(cluster, "r", "g") as reading:
        reading.subscribe(["orders"])
        found: list[bytes] = []
        soon(lambda: polled(reading, 4, found))
        assert sorted(found) == [b"0", b"1", b"2", b"3"]
        reading.commit()
    with consumer(cluster, "w", "g") as other, pytest.raises(GroupAuthorizationFailed):
        other.subscribe(["orders"])
        polled(other, 1, [])
    with consumer(cluster, "w", "none") as alone, pytest.raises(TopicAuthorizationFailed, match="may not READ"):
        alone.assign([TopicPartition("orders", 0)])
        alone.seek(TopicPartition("orders", 0), 0)
        polled(alone, 1, [])


def polled(reading: Consumer, count: int, found: list[bytes]) -> None:
    """Poll until so many values are found, counting those that came before a refusal."""
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline_s:
        found += [record.value or b"" for record in reading.poll(0.2)]


def test_what_is_taken_away_is_gone_at_once_for_streams_that_stand(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("news", partitions=2)  # one on each broker
    rights = [may("s", READ, TOPIC, "news"), may("s", READ, GROUP, "s"), may("s", WRITE, TOPIC, "news")]
    admin.create_acls(rights)
    with producer(cluster, "s") as writing, consumer(cluster, "s", "s") as reading:
        for partition in (0, 1):
            soon(partial(write, writing, "news", b"a", partition))
        reading.subscribe(["news"])
        found: list[bytes] = []
        soon(lambda: polled(reading, 2, found))
        assert found == [b"a", b"a"]
        admin.delete_acls(
            [AclFilter(operation=WRITE, principal="User:s"), AclFilter(operation=READ, principal="User:s")]
        )
        for partition in (0, 1):
            soon_refused(TopicAuthorizationFailed, partial(write, writing, "news", b"b", partition))
        with producer(cluster, "admin") as telling:
            for partition in (0, 1):
                write(telling, "news", b"secret", partition)
        deadline_s = time.monotonic() + PATIENCE_S
        with pytest.raises((TopicAuthorizationFailed, GroupAuthorizationFailed)):
            while time.monotonic() < deadline_s:
                assert all(record.value == b"b" for record in reading.poll(0.2))


def test_a_role_is_given_and_taken_on_both_brokers(cluster: Cluster, admin: Admin) -> None:
    """Permissions of a role hold for the users that have it, as long as they have it; a denial in a role wins."""
    admin.create_topic("invoices", partitions=2)  # one on each broker
    rights = [AclBinding("Role:writers", each, TOPIC, "invoices") for each in (WRITE, READ)]
    admin.create_role("writers", rights, "User:rita")

    def send(user: str) -> None:
        with producer(cluster, user) as made:
            for partition in range(2):
                write(made, "invoices", b"v", partition)

    soon(lambda: send("rita"))
    refusal = soon_refused(TopicAuthorizationFailed, lambda: send("saul"))
    assert "raftlog acl add --allow-principal User:saul" in str(refusal)
    admin.alter_role("writers", grant="User:saul", revoke="User:rita")
    soon(lambda: send("saul"))
    soon_refused(TopicAuthorizationFailed, lambda: send("rita"))
    with producer(cluster, "saul") as made:  # its streams stand
        for partition in range(2):
            write(made, "invoices", b"v", partition)
        admin.create_role("barred", AclBinding("Role:barred", WRITE, TOPIC, "invoices", permission=AclPermission.DENY))
        admin.alter_role("barred", grant="User:saul")
        for partition in range(2):
            work = partial(write, made, "invoices", b"v", partition)
            soon_refused(TopicAuthorizationFailed, work, "role 'barred' denies it")
    assert [each.name for each in admin.describe_roles(principal="User:saul")] == ["barred", "writers"]
    assert not [each for each in admin.describe_acls() if each.principal.startswith("Role:")]
    for name in ("barred", "writers"):
        admin.delete_role(name)
    soon_refused(TopicAuthorizationFailed, lambda: send("saul"), "raftlog acl add")


def test_lists_show_what_may_be_described(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("shown", partitions=1)
    admin.create_topic("hidden", partitions=1)
    for group in ("g-shown", "g-hidden"):
        admin.alter_group_offsets(group, {TopicPartition("shown", 0): 0, TopicPartition("hidden", 0): 0})
    admin.create_acls(
        [
            may("d", DESCRIBE, TOPIC, "shown"),
            may("d", DESCRIBE, GROUP, "g-shown"),
            may("d", DESCRIBE, TXN, "t-shown"),
        ]
    )
    for transactional_id in ("t-shown", "t-hidden"):
        with producer(cluster, "admin", transactional_id=transactional_id) as made:
            made.begin_transaction()
            for topic in ("shown", "hidden"):
                made.send(topic, b"x", partition=0)
            made.commit_transaction()
    with Admin(cluster.bootstrap, config=cluster.authority.client_config("d")) as seeing:
        soon(lambda: seeing.describe_topic("shown"))
        soon_is(["shown"], seeing.list_topics)
        soon_is(["g-shown"], lambda: [group.group_id for group in seeing.list_groups()])
        soon_is([TopicPartition("shown", 0)], lambda: list(seeing.group_offsets("g-shown")))
        soon_is(["t-shown"], lambda: [each.transactional_id for each in seeing.list_transactions()])
        with pytest.raises(TopicAuthorizationFailed):
            seeing.describe_topic("hidden")
        with pytest.raises(TopicAuthorizationFailed):
            seeing.describe_topic("there is none")
        with pytest.raises(GroupAuthorizationFailed):
            seeing.group_offsets("g-hidden")
        with pytest.raises(TransactionalIdAuthorizationFailed):
            seeing.describe_transactions(["t-hidden"])
        with pytest.raises(ClusterAuthorizationFailed):
            seeing.describe_acls()


def test_transactions_need_their_id_and_their_topics(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("ledger", partitions=1)
    admin.create_topic("audited", partitions=1)
    admin.create_acls([may("t", WRITE, TOPIC, "ledger"), may("t", WRITE, TXN, "tx"), may("t", READ, TOPIC, "audited")])
    with pytest.raises(TransactionalIdAuthorizationFailed), producer(cluster, "t", transactional_id="other") as others:
        others.begin_transaction()
        write(others, "ledger", b"x")

    def commit() -> None:
        with producer(cluster, "t", transactional_id="tx") as mine:
            mine.begin_transaction()
            mine.send("ledger", b"x", partition=0)
            mine.commit_transaction()

    soon(commit)

    def write_where_it_may_only_read() -> None:
        with producer(cluster, "t", transactional_id="tx") as mine:
            mine.begin_transaction()
            write(mine, "audited", b"x")

    soon_refused(RaftlogError, write_where_it_may_only_read, "User:t may not WRITE to topic 'audited'")


def test_a_tenant_harms_nobody_with_producer_ids(cluster: Cluster, admin: Admin) -> None:
    """A hostile client with WRITE of the topic, and what it knows from reading it: the others' ids and epochs."""
    created = admin.create_topic("shared", partitions=1)
    assert created is not None
    topic_id = created.topic_id
    admin.create_acls(
        [
            *(may(user, WRITE, TOPIC, "shared") for user in ("hostile", "honest")),
            may("honest", WRITE, TXN, "honest"),
            may("hostile", WRITE, TXN, "hostile"),
        ]
    )
    certificate = cluster.authority.issue("hostile", hosts=())

    async def sent_to(address: str, batch: bytes, transactional_id: str) -> int:
        async with secure_channel(address, cluster.authority.ca_file, certificate) as channel:
            client = RawClient(channel)
            try:
                result = await client.produce(topic_id, batch, transactional_id=transactional_id)
            finally:
                await client.close()
            return int(result.error.code)

    async def refused(producer_id: int, epoch: int, *, transactional: bool, transactional_id: str = "") -> None:
        """Send one record with these numbers to the leader; the other broker says that it is none."""
        attributes = int(Attributes.TRANSACTIONAL) if transactional else 0
        batch = batch_of(
            b"hostile", attributes=attributes, producer_id=producer_id, producer_epoch=epoch, base_sequence=0
        )
        codes = {await sent_to(address, batch, transactional_id) for address in cluster.bootstrap.split(",")}
        assert common_pb2.NONE not in codes
        assert codes & {
            common_pb2.INVALID_PRODUCER_ID_MAPPING,
            common_pb2.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            common_pb2.UNSUPPORTED_VERSION,
        }, codes

    async def attack(producer_id: int, epoch: int) -> None:
        for number in range(1, 4):  # not given out yet
            await refused(number, 32_767, transactional=False)
            await refused(producer_id + (number << 24), 32_767, transactional=False)
        await refused(producer_id, epoch, transactional=False)
        await refused(producer_id, 32_767, transactional=False)
        for name in ("hostile", "honest", ""):
            await refused(producer_id, epoch, transactional=True, transactional_id=name)
            await refused(producer_id, 32_767, transactional=True, transactional_id=name)

    def numbers() -> tuple[int, int]:
        described = soon(lambda: admin.describe_transactions(["honest"])["honest"])
        return described.producer_id, described.producer_epoch

    def written() -> None:
        with producer(cluster, "hostile") as one:
            write(one, "shared", b"hostile")

    soon(written)
    with producer(cluster, "honest", transactional_id="honest") as honest:
        soon(honest.init_transactions)
        asyncio.run(attack(*numbers()))
        honest.begin_transaction()
        write(honest, "shared", b"first")
        asyncio.run(attack(*numbers()))
        write(honest, "shared", b"second")
        honest.commit_transaction()

    def ids() -> set[int]:
        described = admin.describe_producers("shared")[TopicPartition("shared", 0)]
        return {each.producer_id for each in described.producers}

    before = ids()
    assert len(before) == 2, "the partition must know the two honest producers only, as refused batches leave nothing"
    with producer(cluster, "honest") as plain:
        write(plain, "shared", b"third")
        (producer_id,) = ids() - before
        asyncio.run(refused(producer_id, 1, transactional=False))
        write(plain, "shared", b"fourth")
    config = cluster.authority.client_config("admin")
    with Consumer(cluster.bootstrap, config=config, isolation_level="read_committed") as reading:
        reading.assign([TopicPartition("shared", 0)])
        reading.seek_to_beginning()
        found: list[bytes] = []
        polled(reading, 5, found)
    assert found == [b"hostile", b"first", b"second", b"third", b"fourth"]


def test_what_the_cluster_keeps_for_itself_is_for_super_users(cluster: Cluster, admin: Admin) -> None:
    admin.create_acls(
        [may("all", AclOperation.ALL, kind, "*") for kind in (TOPIC, GROUP, TXN)]
        + [may("all", AclOperation.ALL, CLUSTER, "raftlog-cluster")]
    )
    admin.alter_group_offsets("made", {TopicPartition("orders", 0): 0})  # there has to be a topic of the groups
    own = TopicPartition("__consumer_offsets", 0)

    def read_what_is_the_clusters() -> None:
        with consumer(cluster, "all", "all") as reading:
            reading.assign([own])
            reading.seek(own, 0)
            polled(reading, 1, [])

    soon_refused(TopicAuthorizationFailed, read_what_is_the_clusters, "super users")
    with consumer(cluster, "admin", "all") as reading:
        reading.assign([own])
        reading.seek(own, 0)
        reading.poll(0.2)


def test_credentials_reach_the_other_broker_and_no_client(cluster: Cluster, admin: Admin) -> None:
    admin.alter_user("zoe", "a long secret")
    address_of_2 = cluster.bootstrap.split(",")[1]

    async def main() -> None:
        certificate = cluster.authority.issue("admin", hosts=())
        async with secure_channel(address_of_2, cluster.authority.ca_file, certificate) as channel:
            users: Any = security_pb2_grpc.SecurityStub(channel)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    described = await users.DescribeUsers(security_pb2.DescribeUsersRequest(users=["zoe"]))
                    if [user.user for user in described.users] == ["zoe"]:
                        break
                    await asyncio.sleep(0.02)
            stub: Any = metadata_pb2_grpc.MetadataStub(channel)
            watch = stub.Watch(metadata_pb2.WatchRequest(from_offset=-1))
            kinds: set[str] = set()
            more = True
            while more:
                response = await asyncio.wait_for(watch.read(), TIMEOUT_S)
                kinds |= {record.WhichOneof("record") for record in response.records}
                more = response.more
            assert {"topic", "partition", "acl"} <= kinds
            assert not kinds & {"scram_credential", "producer_id_key"}
            watch.cancel()

    asyncio.run(main())


def test_a_doctor_that_may_not_see_everything_says_so_until_it_may(cluster: Cluster, admin: Admin) -> None:
    admin.create_topic("unseen", partitions=1)
    admin.alter_group_offsets("g-unseen", {TopicPartition("unseen", 0): 0})
    with producer(cluster, "admin", transactional_id="t-unseen") as made:
        made.begin_transaction()
        made.send("unseen", b"x", partition=0)
        made.commit_transaction()
    looks = (DESCRIBE, AclOperation.DESCRIBE_CONFIGS)
    admin.create_acls([may("ops", each, CLUSTER, "raftlog-cluster") for each in looks])

    def not_seen(seeing: Admin) -> Finding | None:
        found = examine(collect(seeing, interval_s=0), CHECKS).findings
        return next((each for each in found if each.check == "not-all-seen"), None)

    with Admin(cluster.bootstrap, config=cluster.authority.client_config("ops")) as seeing:
        soon(lambda: [seeing.describe_log_dirs(broker) for broker in cluster.node_ids])
        soon(lambda: [seeing.describe_configs(broker=broker) for broker in cluster.node_ids])
        unseen = {
            "some of the transactions",
            "topic unseen",
            "topic __consumer_offsets",
            "topic __transaction_state",
            "group g-unseen",
        }
        deadline_s = time.monotonic() + PATIENCE_S
        while (finding := not_seen(seeing)) is None or not unseen <= set(finding.where):  # a question was not answered
            assert time.monotonic() < deadline_s, finding
        for command in finding.remedy.split("; "):
            words = shlex.split(command)
            assert words[:5] == ["raftlog", "acl", "add", "--allow-principal", "User:ops"]
            kind = {"--topic": TOPIC, "--group": GROUP, "--transactional-id": TXN}[words[-2]]
            operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
            named = {"Describe": DESCRIBE, "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS}
            admin.create_acls([may("ops", named[each], kind, words[-1]) for each in operations])
        deadline_s = time.monotonic() + PATIENCE_S
        while (finding := not_seen(seeing)) is not None:
            assert time.monotonic() < deadline_s, finding


def test_who_may_only_describe_a_topic_sees_it(cluster: Cluster, admin: Admin, tmp_path: Path) -> None:
    admin.create_topic("glimpsed", partitions=1)
    admin.create_acls([may("glimpse", DESCRIBE, TOPIC, "glimpsed")])
    config = cluster.authority.client_config("glimpse")
    with Admin(cluster.bootstrap, config=config) as seeing:
        soon(lambda: seeing.describe_topic("glimpsed"))
    file = tmp_path / "client.toml"
    file.write_text("".join(f"{key!r} = {str(value)!r}\n" for key, value in config.items()))
    options = ["--bootstrap", cluster.bootstrap, "--client-config", str(file)]
    command = [sys.executable, "-P", "-m", "raftlog", "topic", "describe", "glimpsed", *options]
    deadline_s = time.monotonic() + PATIENCE_S
    while True:  # it may ask the broker that hears of the permission later
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode == 0 and "does not answer" not in done.stderr:
            break
        assert time.monotonic() < deadline_s, done.stderr
    assert "note: the lags of replicas are unknown: not allowed (User:glimpse may not DESCRIBE the cluster" in (
        done.stderr
    )
    assert "glimpsed: configs: not allowed (User:glimpse may not DESCRIBE_CONFIGS topic 'glimpsed'" in done.stderr
    assert "error" not in done.stderr


def test_a_client_learns_what_it_may_do(cluster: Cluster, admin: Admin) -> None:
    """KIP-430: topics, groups, transactional ids and the cluster."""

    def exactly(*operations: AclOperation) -> frozenset[AclOperation] | None:
        return frozenset(operations)

    admin.create_topic("ninas", partitions=1)
    admin.create_acls(
        [
            may("nina", READ, TOPIC, "ninas"),
            may("nina", AclOperation.DELETE, GROUP, "ninas"),
            may("nina", WRITE, TXN, "ninas"),
            may("nina", AclOperation.ALTER_CONFIGS, CLUSTER, "raftlog-cluster"),
        ]
    )
    admin.alter_group_offsets("ninas", {TopicPartition("ninas", 0): 0})
    with producer(cluster, "admin", transactional_id="ninas") as writing, writing.transaction():
        writing.send("ninas", b"1")
    with Admin(cluster.bootstrap, config=cluster.authority.client_config("nina")) as nina:
        soon_is(
            exactly(READ, DESCRIBE),
            lambda: nina.describe_topic("ninas", include_authorized_operations=True).authorized_operations,
        )
        (listed,) = soon(lambda: nina.describe_topics(include_authorized_operations=True))
        assert (listed.name, listed.authorized_operations) == ("ninas", exactly(READ, DESCRIBE))
        soon_is(
            exactly(AclOperation.DELETE, DESCRIBE),
            lambda: nina.describe_group("ninas", include_authorized_operations=True).authorized_operations,
        )
        soon_is(
            exactly(WRITE, DESCRIBE),
            lambda: nina.describe_transaction("ninas", include_authorized_operations=True).authorized_operations,
        )
        soon_is(
            exactly(AclOperation.ALTER_CONFIGS, AclOperation.DESCRIBE_CONFIGS),
            lambda: nina.describe_cluster(include_authorized_operations=True).authorized_operations,
        )
        assert nina.describe_topic("ninas").authorized_operations is None, (
            "authorized operations must come only if they are asked for"
        )
        assert nina.describe_cluster().may_create_topics is None, "may_create_topics must come only if it is asked for"
        assert nina.describe_cluster(include_authorized_operations=True).may_create_topics is False
        refused: dict[str, RaftlogError] = {}
        assert nina.describe_topic_configs(["ninas"], missing=refused) == {}
        assert isinstance(refused["ninas"], TopicAuthorizationFailed)
        prefix = AclBinding("User:nina", AclOperation.CREATE, TOPIC, "ninas-", PatternType.PREFIXED)
        admin.create_acls([prefix, may("nina", AclOperation.DESCRIBE_CONFIGS, TOPIC, "ninas")])
        soon_is(True, lambda: bool(nina.describe_cluster(include_authorized_operations=True).may_create_topics))
        soon(lambda: nina.describe_topic_configs(["ninas"]))
        assert nina.group_lags(["ninas"])["ninas"][TopicPartition("ninas", 0)].offset == 0
    every = admin.describe_cluster(include_authorized_operations=True).authorized_operations
    assert every is not None
    assert {AclOperation.ALTER, AclOperation.CLUSTER_ACTION} < every
