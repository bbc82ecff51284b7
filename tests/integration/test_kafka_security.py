"""Kafka's clients, unmodified, at a listener with TLS, users and permissions: librdkafka, kafka-python and aiokafka.

One broker serves all tests of passwords, another one those of certificates. Each test has a user of its own where it
gets a password wrong: twenty wrong ones lock a user out of an address for a minute.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import aiokafka
import confluent_kafka
import grpc
import kafka
import pytest
from confluent_kafka.admin import AdminClient

import raftlog
from broker.kafka import messages
from broker.kafka.codec import Fields
from raftlog import AclBinding, AclOperation, Admin, PatternType, ResourceType
from raftlog._client.connections import connections
from raftlog._client.options import AdminOptions
from raftlog.testing import Cluster
from raftlog.v1.log_pb2_grpc import LogStub
from tests.support import patience
from tests.support.issuer import AUDIENCE, ISSUER, Issuer

PATIENCE_S = 60.0
MECHANISMS = ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"]
PASSWORD = "Sesame, open!"
QUIET: dict[str, Any] = {"log_level": 0}
USERS = dict.fromkeys(("admin", "ada", "guest", "forgetful", "mallory"), PASSWORD)
SHUT_OUT_S = 10.0
_SHORTENED = f"""
import broker.net.calls
broker.net.calls.SHUT_OUT_MS = {1_000 * SHUT_OUT_S}
"""
"""Makes a server shut users out for less than a minute."""
CONFIG: dict[str, str | int] = {
    "authorizer": "acl",
    "super.users": "User:admin",
    "sasl.enabled.mechanisms": ",".join(MECHANISMS),
    "connections.max.reauth.ms": 600_000,
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def cluster(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = {
        **CONFIG,
        "sasl.enabled.mechanisms": ",".join((*MECHANISMS, "OAUTHBEARER")),
        "sasl.oauthbearer.jwks.endpoint.url": issuer.write(tmp_path_factory.mktemp("keys") / "keys.json"),
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "max.short.stream.rate": 20,
    }
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(_SHORTENED)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(site))
        made = Cluster(users=USERS, kafka=True, config=config).__enter__()
    with made as started:
        with Admin(started.bootstrap, config=started.client_config) as admin:
            for topic in ("a-topic", "theirs"):
                admin.create_topic(topic)
            admin.create_acls(
                [
                    AclBinding("User:ada", operation, ResourceType.TOPIC, "a-", PatternType.PREFIXED)
                    for operation in (AclOperation.READ, AclOperation.WRITE)
                ]
            )
        yield started


def settings(cluster: Cluster, user: str, mechanism: str = "SCRAM-SHA-512", password: str = PASSWORD) -> dict[str, Any]:
    """Return what librdkafka is to be told."""
    return {
        "bootstrap.servers": cluster.kafka_bootstrap,
        **cluster.client_config_of(user, password),
        "sasl.mechanism": mechanism,
        **QUIET,
    }


def written(conf: dict[str, Any], topic: str, value: bytes) -> Any:
    """Write a record with librdkafka; return the error of its delivery."""
    answers: list[Any] = []
    producer = confluent_kafka.Producer(conf)
    producer.produce(topic, value, partition=0, on_delivery=lambda error, _: answers.append(error))
    until(lambda: producer.poll(0.1) > 0 or bool(answers))
    return answers[0]


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    patience.until(condition, within_s=PATIENCE_S)


# Passwords


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_logs_in(cluster: Cluster, mechanism: str) -> None:
    assert written(settings(cluster, "ada", mechanism), "a-topic", b"x") is None


def test_librdkafka_shows_a_token_of_an_issuer(cluster: Cluster, issuer: Issuer) -> None:
    def conf(user: str, **claims: Any) -> dict[str, Any]:
        token = issuer.token(user, **claims)
        return {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(cluster.authority.ca_file),
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": lambda _: (token, time.time() + 600),
            **QUIET,
        }

    assert written(conf("ada"), "a-topic", b"x") is None
    told: list[Any] = []
    producer = confluent_kafka.Producer({**conf("ada", aud="another"), "error_cb": told.append})
    until(lambda: producer.poll(0.1) >= 0 and bool(told))
    assert told[0].code() == confluent_kafka.KafkaError._AUTHENTICATION
    assert "the token is not valid here" in told[0].str()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python_logs_in(cluster: Cluster, mechanism: str) -> None:
    producer = kafka.KafkaProducer(
        bootstrap_servers=cluster.kafka_bootstrap,
        security_protocol="SASL_SSL",
        ssl_cafile=str(cluster.authority.ca_file),
        sasl_mechanism=mechanism,
        sasl_plain_username="ada",
        sasl_plain_password=PASSWORD,
    )
    try:
        assert producer.send("a-topic", b"y").get(PATIENCE_S).offset >= 0
    finally:
        producer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_aiokafka_logs_in(cluster: Cluster, mechanism: str) -> None:
    async def run() -> int:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=cluster.kafka_bootstrap,
            security_protocol="SASL_SSL",
            ssl_context=ssl.create_default_context(cafile=str(cluster.authority.ca_file)),
            sasl_mechanism=mechanism,
            sasl_plain_username="ada",
            sasl_plain_password=PASSWORD,
        )
        await producer.start()
        try:
            sent: Any = await producer.send_and_wait("a-topic", b"z")
        finally:
            await producer.stop()
        return int(sent.offset)

    assert asyncio.run(run()) >= 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_is_said_to_be_wrong(cluster: Cluster, mechanism: str) -> None:
    told: list[Any] = []
    conf = settings(cluster, "forgetful", mechanism, "wrong")
    # Each attempt is a wrong password, and few are allowed.
    conf |= {"error_cb": told.append, "reconnect.backoff.ms": 60_000, "reconnect.backoff.max.ms": 60_000}
    producer = confluent_kafka.Producer(conf)
    until(lambda: producer.poll(0.1) >= 0 and bool(told))
    assert told[0].code() == confluent_kafka.KafkaError._AUTHENTICATION
    assert "there is no user 'forgetful', or the password is wrong" in told[0].str()


def test_a_changed_password_ends_a_connection(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        admin.alter_user("eve", PASSWORD)
        admin.create_acls([AclBinding("User:eve", AclOperation.WRITE, ResourceType.TOPIC, "a-", PatternType.PREFIXED)])
        told: list[Any] = []
        conf = settings(cluster, "eve")
        conf |= {"error_cb": told.append, "reconnect.backoff.ms": 500, "reconnect.backoff.max.ms": 60_000}
        producer = confluent_kafka.Producer(conf)
        delivered: list[Any] = []
        producer.produce("a-topic", b"x", on_delivery=lambda error, _: delivered.append(error))
        until(lambda: producer.flush(0.1) == 0 and bool(delivered))
        assert delivered == [None]
        admin.alter_user("eve", "another one")
        until(
            lambda: (
                producer.poll(0.1) >= 0
                and any(each.code() == confluent_kafka.KafkaError._AUTHENTICATION for each in told)
            )
        )


# Users that are shut out


async def flood(cluster: Cluster, user: str) -> str:
    """Open and end streams at the other listener until the user is shut out; return what the broker then says."""
    options = AdminOptions.make(cluster.client_config_of(user, PASSWORD), {})
    channels = connections(options.pem, options.sasl)
    try:
        while True:
            stream = LogStub(channels.channel(cluster.bootstrap)).Fetch(timeout=PATIENCE_S)
            await stream.done_writing()
            if await stream.code() is not grpc.StatusCode.OK:
                return str(await stream.details())
    finally:
        await channels.close()


def test_a_user_that_is_shut_out_is_refused_at_once_and_let_in_again_after_the_time(cluster: Cluster) -> None:
    began_s = time.monotonic()
    assert "User:mallory has opened and ended streams too fast" in asyncio.run(flood(cluster, "mallory"))
    told: list[Any] = []
    conf = settings(cluster, "mallory")
    conf |= {"error_cb": told.append}
    client = AdminClient(conf)
    why = "SASL authentication error: SaslAuthenticateRequest failed"
    until(lambda: client.poll(0.1) >= 0 and any(why in each.str() for each in told))
    assert time.monotonic() - began_s < SHUT_OUT_S, "the client hung until its user could come back"
    assert confluent_kafka.KafkaError._AUTHENTICATION not in {each.code() for each in told}, (
        "the password is right, and clients that are told otherwise do not come back"
    )
    log = (cluster.config_file(1).parent / "server.log").read_text()
    assert "reason='User:mallory has opened and ended streams too fast (max.short.stream.rate); it may come back" in log
    assert set(AdminClient(settings(cluster, "ada")).list_topics(timeout=PATIENCE_S).topics) == {"a-topic"}

    def is_let_in() -> bool:
        try:
            return client.list_topics(timeout=1.0).topics == {}
        except confluent_kafka.KafkaException:
            return False

    until(is_let_in)
    assert time.monotonic() - began_s >= SHUT_OUT_S


# Permissions


def test_a_user_without_permissions_sees_nothing(cluster: Cluster) -> None:
    client = AdminClient(settings(cluster, "guest"))
    assert client.list_topics(timeout=PATIENCE_S).topics == {}
    topic = client.list_topics("a-topic", timeout=PATIENCE_S).topics["a-topic"]
    assert topic.error is not None
    assert topic.error.code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert topic.partitions == {}
    error = written({**settings(cluster, "guest"), "enable.idempotence": False}, "theirs", b"x")
    assert error.code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_a_user_sees_what_it_may(cluster: Cluster) -> None:
    assert set(AdminClient(settings(cluster, "ada")).list_topics(timeout=PATIENCE_S).topics) == {"a-topic"}
    error = written({**settings(cluster, "ada"), "enable.idempotence": False}, "theirs", b"x")
    assert error.code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED


# Bytes


class Raw:
    """A connection that sends what it is told to."""

    def __init__(self, cluster: Cluster) -> None:
        host, _, port = cluster.kafka_bootstrap.split(",")[0].rpartition(":")
        context = ssl.create_default_context(cafile=str(cluster.authority.ca_file))
        plain = socket.create_connection((host, int(port)), PATIENCE_S)
        self._socket = context.wrap_socket(plain, server_hostname=host)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def request(self, key: int, version: int, request: Fields) -> None:
        """Send a request."""
        message = messages.REQUESTS[key]
        body = b"".join(message.encode(request, version))
        head = struct.pack(">hhih", key, version, 9, 1) + b"c" + (b"\0" if message.is_flexible(version) else b"")
        self.send(struct.pack(">i", len(head) + len(body)) + head + body)

    def ask(self, key: int, version: int, request: Fields) -> Fields:
        """Return the response to a request."""
        response = messages.RESPONSES[key]
        self.request(key, version, request)
        (size,) = struct.unpack(">i", self._exactly(4))
        answer = self._exactly(size)
        at = 5 if response.is_flexible(version) and key != messages.API_VERSIONS else 4
        return response.decode(memoryview(answer), version, at)

    def token(self, message: bytes) -> bytes:
        """Send a message of SASL without a header, and return the answer."""
        self.send(struct.pack(">i", len(message)) + message)
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def is_closed(self) -> bool:
        """Wait until the other end closes the connection."""
        try:
            return self._socket.recv(1) == b""
        except (ConnectionResetError, ssl.SSLError):
            return True

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            assert piece, f"the broker closed the connection after {len(data)} of {size} bytes of its answer"
            data += piece
        return data


@pytest.mark.parametrize("key", sorted({*messages.REQUESTS} - messages.AUTHENTICATING), ids=messages.api_name)
def test_no_other_request_comes_before_authentication(cluster: Cluster, key: int) -> None:
    with Raw(cluster) as raw:
        assert raw.ask(messages.API_VERSIONS, 0, {})["error_code"] == 0
        request = request_of(key, id_of(cluster, "a-topic"))  # one that is answered after a login
        raw.request(key, messages.REQUESTS[key].last, request)
        assert raw.is_closed()


def test_mechanisms_and_their_order(cluster: Cluster) -> None:
    with Raw(cluster) as raw:
        answer = raw.ask(messages.SASL_HANDSHAKE, 1, {"mechanism": "GSSAPI"})
        assert answer == {"error_code": 33, "mechanisms": [*MECHANISMS, "OAUTHBEARER"]}
        assert raw.is_closed()
    with Raw(cluster) as raw:
        assert raw.ask(messages.SASL_AUTHENTICATE, 2, {"auth_bytes": b""})["error_code"] == 34
        assert raw.is_closed()


def test_messages_without_headers(cluster: Cluster) -> None:
    """SaslHandshake of version 0 goes before them."""
    with Raw(cluster) as raw:
        assert raw.ask(messages.SASL_HANDSHAKE, 0, {"mechanism": "PLAIN"})["error_code"] == 0
        assert raw.token(f"\0ada\0{PASSWORD}".encode()) == b""
        assert [each["name"] for each in raw.ask(messages.METADATA, 1, {"topics": None})["topics"]] == ["a-topic"]
    with Raw(cluster) as raw:
        assert raw.ask(messages.SASL_HANDSHAKE, 0, {"mechanism": "PLAIN"})["error_code"] == 0
        raw.send(struct.pack(">i", 17 << 10))
        assert raw.is_closed()


def log_in(raw: Raw, user: str, mechanism: str = "PLAIN") -> Fields:
    """Log in with PLAIN; return the answer."""
    assert raw.ask(messages.SASL_HANDSHAKE, 1, {"mechanism": mechanism})["error_code"] == 0
    return raw.ask(messages.SASL_AUTHENTICATE, 2, {"auth_bytes": f"\0{user}\0{PASSWORD}".encode()})


def test_a_session_belongs_to_one_user(cluster: Cluster) -> None:
    with Raw(cluster) as raw:
        assert log_in(raw, "ada") == {
            "error_code": 0,
            "error_message": None,
            "auth_bytes": b"",
            "session_lifetime_ms": 600_000,
        }
        assert log_in(raw, "ada")["error_code"] == 0
        answer = log_in(raw, "guest")
        assert answer["error_code"] == 58
        assert "User:ada's" in answer["error_message"]
        assert raw.is_closed()


# Every API, as a user without any permission

REFUSALS = frozenset({29, 30, 31, 53})
"""TOPIC_, GROUP_, CLUSTER_ and TRANSACTIONAL_ID_AUTHORIZATION_FAILED."""
OPEN: dict[int, Fields] = {
    messages.METADATA: {"topics": None},
    messages.DESCRIBE_CLUSTER: {"endpoint_type": 1},
    messages.LIST_GROUPS: {},
    messages.LIST_TRANSACTIONS: {},
}
"""Requests that everybody may send; the lists in their answers are empty, but for `brokers`."""
OF_CONFIGS = "topic_config_error_code"
"""Says why CreateTopics shows no configs."""


def examples(topic_id: bytes) -> dict[int, Fields]:
    """Return requests of the newest version, where one with a value for every field is refused for another reason."""
    return {
        messages.PRODUCE: {
            "acks": -1,
            "topic_data": [{"name": "theirs", "topic_id": topic_id, "partition_data": [{"index": 0, "records": b""}]}],
        },
        messages.CREATE_TOPICS: {
            "topics": [{"name": "new", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}]
        },
        messages.INIT_PRODUCER_ID: {"transactional_id": None},
        messages.DESCRIBE_CONFIGS: {"resources": [{"resource_type": 2, "resource_name": "theirs"}]},
        messages.ALTER_CONFIGS: {"resources": [{"resource_type": 2, "resource_name": "theirs", "configs": []}]},
        messages.INCREMENTAL_ALTER_CONFIGS: {
            "resources": [{"resource_type": 2, "resource_name": "theirs", "configs": []}]
        },
        messages.CREATE_PARTITIONS: {"topics": [{"name": "theirs", "count": 2, "assignments": None}]},
        messages.OFFSET_FETCH: {"groups": [{"group_id": "g", "topics": None}]},
    }


def id_of(cluster: Cluster, topic: str) -> bytes:
    """Return a topic's id."""
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        return admin.describe_topic(topic).topic_id


def request_of(key: int, topic_id: bytes) -> Fields:
    """Return a request of an API that a user with all permissions has answered."""
    if key in OPEN:
        return OPEN[key]
    request = messages.REQUESTS[key]
    return examples(topic_id).get(key) or some(request.fields, request.last, topic_id)


def some(fields: list[Any], version: int, topic_id: bytes) -> Fields:
    """Return a request with one element in each array, and the topic `theirs` for each text and id."""
    return {each.name: some_of(each, version, topic_id) for each in fields if each.first <= version <= each.last}


def some_of(each: Any, version: int, topic_id: bytes) -> Any:
    one: Any
    match each.kind:
        case "struct":
            one = some(each.fields, version, topic_id)
        case "string":
            one = "theirs"
        case "uuid":
            one = topic_id
        case _:
            one = each.empty() if not each.is_array else 0
    return [one] if each.is_array else one


def check_refused(answer: Fields, name: str) -> int:
    """Check that every part of an answer is refused; return how many are."""
    parts = [part for value in answer.values() if isinstance(value, list) for part in value if isinstance(part, dict)]
    refused = sum(check_refused(part, name) for part in parts)
    codes = [value for field, value in answer.items() if field.endswith("error_code") and field != OF_CONFIGS]
    code = max(codes, default=0)
    assert code == 0 or code in REFUSALS, (
        f"{name} was answered with the error code {code}, which no refusal of rights has: {answer}"
    )
    if codes and code == 0:
        assert refused, f"{name} was answered, but must be refused: {answer}"
    return refused + int(code != 0)


@pytest.mark.parametrize("key", sorted({*messages.REQUESTS} - messages.AUTHENTICATING), ids=messages.api_name)
def test_every_api_refuses_a_user_without_permissions(cluster: Cluster, key: int) -> None:
    request, name = messages.REQUESTS[key], messages.api_name(key)
    wanted = request_of(key, id_of(cluster, "theirs"))
    with Raw(cluster) as raw:
        assert log_in(raw, "guest")["error_code"] == 0
        if key in OPEN:
            answer = raw.ask(key, request.last, wanted)
            lists = {field: value for field, value in answer.items() if isinstance(value, list) and field != "brokers"}
            assert not any(lists.values())
            assert answer.get("error_code", 0) == 0
        else:
            assert check_refused(raw.ask(key, request.last, wanted), name) > 0


def test_nobody_makes_the_member_of_another_user_leave(cluster: Cluster) -> None:
    """A leave says only the names of the group and the member, which others may know."""
    with Raw(cluster) as raw:
        assert log_in(raw, "guest")["error_code"] == 0
        leave = {**request_of(messages.CONSUMER_GROUP_HEARTBEAT, bytes(16)), "member_epoch": -1}
        assert raw.ask(messages.CONSUMER_GROUP_HEARTBEAT, 1, leave)["error_code"] == 30


def test_what_a_user_may_is_told(cluster: Cluster) -> None:
    """KIP-430: the numbers of the operations as bits."""
    with Raw(cluster) as raw:
        log_in(raw, "ada")
        wanted: Fields = {
            "topics": [{"name": "a-topic"}, {"name": "theirs"}],
            "include_topic_authorized_operations": True,
            "include_cluster_authorized_operations": True,
        }
        answer = raw.ask(messages.METADATA, 8, wanted)
        mine, theirs = answer["topics"]
        assert mine["topic_authorized_operations"] == 1 << 3 | 1 << 4 | 1 << 8
        assert (theirs["error_code"], theirs["topic_authorized_operations"]) == (29, -(1 << 31))
        assert answer["cluster_authorized_operations"] == 0
        wanted["include_topic_authorized_operations"] = False
        assert raw.ask(messages.METADATA, 8, wanted)["topics"][0]["topic_authorized_operations"] == -(1 << 31)
        answer = raw.ask(messages.DESCRIBE_CLUSTER, 1, {"include_cluster_authorized_operations": True})
        assert answer["cluster_authorized_operations"] == 0


def test_a_topic_that_may_not_be_described_keeps_its_name(cluster: Cluster) -> None:
    topic_id = id_of(cluster, "theirs")
    with Raw(cluster) as raw:
        log_in(raw, "guest")
        for key in (messages.METADATA, messages.DELETE_TOPICS):
            answer = raw.ask(key, messages.REQUESTS[key].last, {"topics": [{"name": None, "topic_id": topic_id}]})
            (part,) = answer["topics" if key == messages.METADATA else "responses"]
            assert part["error_code"] == 29
            assert "theirs" not in repr(answer)


# ACLs and users by Kafka's APIs


def test_acls_by_librdkafka(cluster: Cluster) -> None:
    admin_api: Any = confluent_kafka.admin
    client: Any = AdminClient(settings(cluster, "admin"))

    def binding(kind: str, name: str, pattern: str, operation: str) -> Any:
        return admin_api.AclBinding(
            admin_api.ResourceType[kind],
            name,
            admin_api.ResourcePatternType[pattern],
            "User:bert",
            "*",
            admin_api.AclOperation[operation],
            admin_api.AclPermissionType.ALLOW,
        )

    made = [
        binding("TOPIC", "b-", "PREFIXED", "READ"),
        binding("GROUP", "g", "LITERAL", "READ"),
        binding("BROKER", "kafka-cluster", "LITERAL", "ALTER"),
    ]
    for future in client.create_acls(made).values():
        assert future.result(PATIENCE_S) is None
    (wrong,) = client.create_acls([binding("TOPIC", "b-", "LITERAL", "IDEMPOTENT_WRITE")]).values()
    with pytest.raises(confluent_kafka.KafkaException, match="INVALID_REQUEST"):
        wrong.result(PATIENCE_S)
    theirs = admin_api.AclBindingFilter(
        admin_api.ResourceType.ANY,
        None,
        admin_api.ResourcePatternType.ANY,
        "User:bert",
        None,
        admin_api.AclOperation.ANY,
        admin_api.AclPermissionType.ANY,
    )
    with Admin(cluster.bootstrap, config=cluster.client_config) as ours:
        mine = {str(each.resource_name) for each in ours.describe_acls() if each.principal == "User:bert"}
        assert mine == {"b-", "g", "raftlog-cluster"}
        ours.create_role("b", [replace(each, principal="Role:b") for each in ours.describe_acls()], "User:bert")
    assert set(client.describe_acls(theirs).result(PATIENCE_S)) == set(made)
    (deleted,) = client.delete_acls([theirs]).values()
    assert set(deleted.result(PATIENCE_S)) == set(made)
    assert client.describe_acls(theirs).result(PATIENCE_S) == [], (
        "the ACLs of roles must not be listed to Kafka clients, which know no roles"
    )
    theirs.principal = None
    assert not [each for each in client.describe_acls(theirs).result(PATIENCE_S) if "Role:" in each.principal]
    with Admin(cluster.bootstrap, config=cluster.client_config) as ours:
        ours.delete_role("b")


def test_users_by_librdkafka(cluster: Cluster) -> None:
    admin_api: Any = confluent_kafka.admin
    client: Any = AdminClient(settings(cluster, "admin"))
    info = admin_api.ScramCredentialInfo(admin_api.ScramMechanism.SCRAM_SHA_256, 5_000)
    made = admin_api.UserScramCredentialUpsertion("dora", info, PASSWORD.encode())
    (done,) = client.alter_user_scram_credentials([made]).values()
    assert done.result(PATIENCE_S) is None
    found = client.describe_user_scram_credentials(["dora"])["dora"].result(PATIENCE_S)
    ((mechanism, iterations),) = [(each.mechanism, each.iterations) for each in found.scram_credential_infos]
    assert (mechanism.name, iterations) == ("SCRAM_SHA_256", 5_000)
    assert AdminClient(settings(cluster, "dora", "SCRAM-SHA-256")).list_topics(timeout=PATIENCE_S).topics == {}
    deletion = admin_api.UserScramCredentialDeletion("dora", admin_api.ScramMechanism.SCRAM_SHA_256)
    (done,) = client.alter_user_scram_credentials([deletion]).values()
    assert done.result(PATIENCE_S) is None
    with pytest.raises(confluent_kafka.KafkaException, match="RESOURCE_NOT_FOUND"):
        client.describe_user_scram_credentials(["dora"])["dora"].result(PATIENCE_S)
    weak = admin_api.ScramCredentialInfo(admin_api.ScramMechanism.SCRAM_SHA_256, 10)
    (refused,) = client.alter_user_scram_credentials(
        [admin_api.UserScramCredentialUpsertion("dora", weak, PASSWORD.encode())]
    ).values()
    with pytest.raises(confluent_kafka.KafkaException):
        refused.result(PATIENCE_S)


def test_quotas_by_kafkas_requests(cluster: Cluster) -> None:
    """librdkafka has no call for them."""

    def entity(**names: str | None) -> list[Fields]:
        return [{"entity_type": kind.replace("_", "-"), "entity_name": name} for kind, name in names.items()]

    def described(raw: Raw, strict: bool, *components: tuple[str, int, str | None]) -> list[Fields]:
        named = [{"entity_type": kind, "match_type": how, "match": name} for kind, how, name in components]
        answer = raw.ask(messages.DESCRIBE_CLIENT_QUOTAS, 1, {"components": named, "strict": strict})
        assert answer["error_code"] == 0
        return list(answer["entries"])

    def op(value: float | None) -> Fields:
        return {"key": "producer_byte_rate", "value": value or 0.0, "remove": value is None}

    ada, default, both = entity(user="ada"), entity(user=None), entity(user="ada", client_id="c")
    with Raw(cluster) as raw:
        log_in(raw, "admin")

        def alter(*entries: tuple[list[Fields], float | None]) -> list[int]:
            made = [{"entity": named, "ops": [op(value)]} for named, value in entries]
            answer = raw.ask(messages.ALTER_CLIENT_QUOTAS, 1, {"entries": made, "validate_only": False})
            assert [each["entity"] for each in answer["entries"]] == [named for named, _ in entries]
            return [each["error_code"] for each in answer["entries"]]

        assert alter((ada, 1e9), (default, 2e9), (both, 3e9), (entity(planet="x"), 1.0), (ada, -1.0)) == [
            0,
            0,
            0,
            42,
            42,
        ]

        def values(entries: list[Fields]) -> dict[str, float]:
            names = ["/".join(str(part["entity_name"]) for part in each["entity"]) for each in entries]
            return {name: each["values"][0]["value"] for name, each in zip(names, entries, strict=True)}

        assert values(described(raw, False, ("user", 0, "ada"))) == {"ada": 1e9, "ada/c": 3e9}
        assert values(described(raw, True, ("user", 0, "ada"))) == {"ada": 1e9}
        assert values(described(raw, True, ("user", 1, None))) == {"None": 2e9}
        assert values(described(raw, True, ("user", 2, None))) == {"None": 2e9, "ada": 1e9}
        assert values(described(raw, True, ("user", 2, None), ("client-id", 2, None))) == {"ada/c": 3e9}
        assert alter((ada, None), (default, None), (both, None)) == [0, 0, 0]
        assert described(raw, False) == []


# Certificates


@pytest.fixture(scope="module")
def certified() -> Iterator[Cluster]:
    config: dict[str, str | int] = {"authorizer": "acl", "super.users": "User:admin"}
    with Cluster(tls=True, kafka=True, config=config) as started:
        with Admin(started.bootstrap, config=started.authority.client_config("admin")) as admin:
            admin.create_topic("a-topic")
            admin.create_acls([AclBinding("User:ada", AclOperation.WRITE, ResourceType.TOPIC, "a-topic")])
        yield started


def test_a_certificate_is_a_user(certified: Cluster) -> None:
    def conf(user: str) -> dict[str, Any]:
        servers = {"bootstrap.servers": certified.kafka_bootstrap}
        return {**servers, **certified.authority.client_config(user), "enable.idempotence": False, **QUIET}

    assert written(conf("ada"), "a-topic", b"x") is None
    error = written(conf("bert"), "a-topic", b"x")
    assert error.code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert set(AdminClient(conf("admin")).list_topics(timeout=PATIENCE_S).topics) == {"a-topic"}


def test_no_certificate_no_connection(certified: Cluster) -> None:
    with pytest.raises((AssertionError, OSError)), Raw(certified) as raw:
        raw.ask(messages.API_VERSIONS, 0, {})
    host, _, port = certified.kafka_bootstrap.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
        plain.sendall(struct.pack(">ihhih", 11, messages.API_VERSIONS, 0, 9, 1) + b"c")
        answer = plain.recv(64)  # TLS's alert
        assert not answer or answer[0] == 21


def test_both_protocols_have_the_same_users(certified: Cluster) -> None:
    config = certified.authority.client_config("ada")
    with raftlog.Producer(certified.bootstrap, config=config) as producer:
        assert producer.send("a-topic", b"x").result(PATIENCE_S).offset >= 0


@pytest.mark.long
def test_a_client_authenticates_again_before_its_session_ends() -> None:
    """KIP-368: librdkafka goes on over the same connection, over several sessions of three seconds."""
    with Cluster(users=USERS, kafka=True, config={**CONFIG, "connections.max.reauth.ms": 3_000}) as cluster:
        with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
            admin.create_topic("a-topic")
        producer = confluent_kafka.Producer(settings(cluster, "admin"))
        delivered: list[Any] = []
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + 10:
            producer.produce("a-topic", b"x", on_delivery=lambda error, _: delivered.append(error))
            producer.poll(0.1)
        until(lambda: producer.flush(0.1) == 0)
        assert set(delivered) == {None}
