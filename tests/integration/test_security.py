"""Users and permissions against real servers with TLS, through gRPC's stubs: what any client would meet."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from scramp import ScramMechanism

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.errors import AuthenticationFailed, SecurityDisabled
from raftlog.testing import Cluster
from raftlog.testing.layout import write_users
from raftlog.v1 import common_pb2, log_pb2, metadata_pb2, metadata_pb2_grpc, security_pb2, security_pb2_grpc
from raftlog.v1.security_pb2 import Acl, ScramCredential, UserMechanism
from tests.support.issuer import AUDIENCE, ISSUER, Issuer, message_of, web_server
from tests.support.sasl_client import TIMEOUT_S, bearer, log_in, secure_channel, token_of
from tests.support.steady import STEADY

Metadata = list[tuple[str, str]]

USERS = {"admin": "the first secret", "bob": "bobs own"}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def cluster(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config: dict[str, str | int] = {
        **STEADY,
        "authorizer": "acl",
        "super.users": "User:admin",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": issuer.write(tmp_path_factory.mktemp("keys") / "keys.json"),
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "sasl.oauthbearer.clock.skew.seconds": 0,
    }
    with Cluster(1, users=USERS, config=config) as made:
        yield made


def _channel(cluster: Cluster) -> aio.Channel:
    return secure_channel(cluster.bootstrap, cluster.authority.ca_file)


def _security(channel: aio.Channel) -> Any:
    return security_pb2_grpc.SecurityStub(channel)


async def _see_topics(channel: aio.Channel, token: Metadata | None) -> None:
    """Make a call that any user may make."""
    stub: Any = metadata_pb2_grpc.MetadataStub(channel)
    await stub.Get(metadata_pb2.MetadataRequest(all_topics=True), metadata=token, timeout=TIMEOUT_S)


async def _refusal(call: Any) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return caught.value.details() or ""


@asynccontextmanager
async def _stream(channel: aio.Channel, token: Metadata) -> AsyncIterator[Any]:
    """Open a fetch stream, and return it once it has answered for a topic that does not exist."""
    call: Any = channel.stream_stream(
        "/raftlog.v1.Log/Fetch",
        request_serializer=log_pb2.FetchRequest.SerializeToString,
        response_deserializer=bytes,
    )(metadata=token)
    unknown = log_pb2.FetchPartition(subscription_id=1, topic_id=b"0" * 16, leader_epoch=-1)
    await call.write(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 20)))
    await call.write(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[unknown])))
    assert isinstance(await asyncio.wait_for(call.read(), TIMEOUT_S), bytes)
    try:
        yield call
    finally:
        call.cancel()


async def _end_of(call: Any) -> str:
    code = await asyncio.wait_for(call.code(), PATIENCE_S)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    return str(await call.details())


def _credential(user: str, password: str, mechanism: str = "SCRAM-SHA-512") -> ScramCredential:
    salt, stored_key, server_key, iterations = ScramMechanism(mechanism).make_auth_info(password, 4096)
    number = security_pb2.SCRAM_SHA_512 if mechanism == "SCRAM-SHA-512" else security_pb2.SCRAM_SHA_256
    return ScramCredential(
        user=user, mechanism=number, salt=salt, stored_key=stored_key, server_key=server_key, iterations=iterations
    )


async def _alter_users(channel: aio.Channel, admin: Metadata, **change: Any) -> None:
    request = security_pb2.AlterUsersRequest(**change)
    answer = await _security(channel).AlterUsers(request, metadata=admin, timeout=TIMEOUT_S)
    assert not answer.HasField("error"), answer.error


def test_a_password_opens_and_nothing_else_does(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with _channel(cluster) as channel:
            assert (await _refusal(_see_topics(channel, None))).startswith("AuthenticationFailed: ")
            assert (await _refusal(_see_topics(channel, bearer("made.up")))).startswith("TokenExpired: ")
            refusals = []
            for user, password in (("admin", "wrong"), ("nobody", "wrong"), ("nobody", "the first secret")):
                began_s = time.monotonic()
                with pytest.raises(AuthenticationFailed) as caught:
                    await log_in(channel, user, password)
                assert time.monotonic() - began_s >= 0.1
                refusals.append(str(caught.value).replace(user, "X"))
            assert len(set(refusals)) == 1, (
                "a refused login must not tell whether the user exists, but the refusals differ"
            )
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                answer = await log_in(channel, "admin", USERS["admin"], mechanism)
                assert answer.lifetime_ms == 3_600_000
                await _see_topics(channel, bearer(answer.token))
                forged = answer.token[:-1] + ("A" if answer.token[-1] != "A" else "B")
                assert (await _refusal(_see_topics(channel, bearer(forged)))).startswith("TokenExpired: ")

    asyncio.run(scenario())


async def _show(channel: aio.Channel, token: str) -> security_pb2.AuthenticateResponse:
    request = security_pb2.AuthenticateRequest(mechanism="OAUTHBEARER", message=message_of(token))
    answer: security_pb2.AuthenticateResponse = await _security(channel).Authenticate(request, timeout=TIMEOUT_S)
    return answer


def test_a_token_of_the_issuer_opens_for_as_long_as_it_lives(cluster: Cluster, issuer: Issuer) -> None:
    async def scenario() -> None:
        async with _channel(cluster) as channel:
            refused = await _show(channel, issuer.token("admin", aud="another cluster"))
            assert refused.error.code == common_pb2.SASL_AUTHENTICATION_FAILED
            assert not refused.token
            answer = await _show(channel, issuer.token("admin", lifetime_s=86_400))
            assert answer.lifetime_ms == 3_600_000
            described = await _security(channel).DescribeUsers(
                security_pb2.DescribeUsersRequest(), metadata=bearer(answer.token), timeout=TIMEOUT_S
            )
            assert not described.HasField("error"), "the user of the token is a super user, so the call must succeed"
            short = await _show(channel, issuer.token("admin", lifetime_s=8))
            assert 0 < short.lifetime_ms <= 8_000
            async with _stream(channel, bearer(short.token)) as call:
                assert (await _end_of(call)).startswith("TokenExpired: ")
            assert (await _refusal(_see_topics(channel, bearer(short.token)))).startswith("TokenExpired: ")
            await _see_topics(channel, bearer(answer.token))

    asyncio.run(scenario())


def test_a_producer_with_short_lived_tokens_loses_nothing(cluster: Cluster, issuer: Issuer) -> None:
    minted = 0

    def answer(path: str, headers: dict[str, str], body: str) -> tuple[int, dict[str, str], str]:
        nonlocal minted
        minted += 1
        return 200, {}, json.dumps({"access_token": issuer.token("admin", lifetime_s=5)})

    with web_server(answer) as base:
        config = {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(cluster.authority.ca_file),
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": f"{base}/token",
            "sasl.oauthbearer.client.credentials.client.id": "billing",
            "sasl.oauthbearer.client.credentials.client.secret": "of billing",
        }
        with Admin(cluster.bootstrap, config=config) as admin:
            admin.create_topic("renewed", 1)
        of_admin, sent = minted, 0
        with Producer(cluster.bootstrap, config=config) as producer:
            while minted < of_admin + 3:
                producer.send("renewed", b"%d" % sent).result(PATIENCE_S)
                sent += 1
                time.sleep(0.05)  # the tokens' time has to pass, and few records suffice
        with Consumer(cluster.bootstrap, config=config) as consumer:
            consumer.assign([TopicPartition("renewed", 0)])
            consumer.seek_to_beginning()
            seen: list[bytes] = []
            until_s = time.monotonic() + PATIENCE_S
            while len(seen) < sent and time.monotonic() < until_s:
                seen += [record.value or b"" for record in consumer.poll(1.0)]
    assert seen == [b"%d" % number for number in range(sent)]


def test_users_come_change_and_go_while_it_runs(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with _channel(cluster) as channel:
            admin = await token_of(channel, "admin", USERS["admin"])
            await _alter_users(channel, admin, upsertions=[_credential("carol", "one")])
            described = await _security(channel).DescribeUsers(security_pb2.DescribeUsersRequest(), metadata=admin)
            assert [(each.user, each.iterations) for each in described.users] == [("carol", 4096)]
            token = await token_of(channel, "carol", "one")
            await _see_topics(channel, token)

            async with _stream(channel, admin) as other, _stream(channel, token) as call:
                await _alter_users(channel, admin, upsertions=[_credential("carol", "two")])
                assert (await _end_of(call)).startswith("TokenExpired: ")
                assert not other.done()
            assert (await _refusal(_see_topics(channel, token))).startswith("TokenExpired: ")
            with pytest.raises(AuthenticationFailed):
                await log_in(channel, "carol", "one")

            token = await token_of(channel, "carol", "two")
            async with _stream(channel, token) as call:
                gone = UserMechanism(user="carol", mechanism=security_pb2.SCRAM_SHA_512)
                await _alter_users(channel, admin, deletions=[gone])
                assert (await _end_of(call)).startswith("TokenExpired: ")
            with pytest.raises(AuthenticationFailed):
                await log_in(channel, "carol", "two")

    asyncio.run(scenario())


def test_the_file_with_users_is_read_again_and_the_metadata_wins(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with _channel(cluster) as channel:
            admin = await token_of(channel, "admin", USERS["admin"])
            token = await token_of(channel, "bob", USERS["bob"])
            async with _stream(channel, token) as call:
                write_users(cluster.directory / "users.toml", {**USERS, "bob": "another"})
                assert (await _end_of(call)).startswith("TokenExpired: ")
            token = await token_of(channel, "bob", "another")
            await _see_topics(channel, admin)
            async with _stream(channel, token) as call:
                await _alter_users(channel, admin, upsertions=[_credential("bob", "of the cluster", "SCRAM-SHA-256")])
                await _end_of(call)
            with pytest.raises(AuthenticationFailed):
                await log_in(channel, "bob", "another")
            await log_in(channel, "bob", "of the cluster", "SCRAM-SHA-256")

    asyncio.run(scenario())


def test_tokens_are_of_the_process_that_issued_them(cluster: Cluster) -> None:
    async def token() -> Metadata:
        async with _channel(cluster) as channel:
            return await token_of(channel, "admin", USERS["admin"])

    async def refused(before: Metadata) -> None:
        async with _channel(cluster) as channel:
            assert (await _refusal(_see_topics(channel, before))).startswith("TokenExpired: ")
            await _see_topics(channel, await token_of(channel, "admin", USERS["admin"]))

    before = asyncio.run(token())
    cluster.stop(1)
    cluster.start(1)
    asyncio.run(refused(before))


def test_certificates_are_users_and_a_nodes_is_a_super_user() -> None:
    """With `ssl`: no user has a password; the certificate's common name is the user. A token takes precedence."""
    users = security_pb2.DescribeUsersRequest()
    allowed = Acl(
        resource_type=Acl.CLUSTER,
        resource_name="raftlog-cluster",
        pattern_type=Acl.LITERAL,
        principal="User:orders",
        host="127.0.0.1",
        operation=Acl.DESCRIBE,
        permission=Acl.ALLOW,
    )

    async def scenario(cluster: Cluster) -> None:
        authority = cluster.authority
        orders = secure_channel(cluster.bootstrap, authority.ca_file, authority.issue("orders", hosts=()))
        others = secure_channel(cluster.bootstrap, authority.ca_file, authority.issue("others", hosts=()))
        node = secure_channel(cluster.bootstrap, authority.ca_file, authority.directory / "node-1.pem")
        async with orders, others, node:
            with pytest.raises(aio.AioRpcError) as caught:
                await _security(orders).DescribeUsers(users, timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "User:orders may not DESCRIBE the cluster" in (caught.value.details() or "")
            request = security_pb2.CreateAclsRequest(acls=[allowed])
            answer = await _security(node).CreateAcls(request, timeout=TIMEOUT_S)
            assert not answer.HasField("error"), answer.error
            assert answer.metadata_offset > 0
            await _security(orders).DescribeUsers(users, timeout=TIMEOUT_S)
            with pytest.raises(aio.AioRpcError):
                await _security(others).DescribeUsers(users, timeout=TIMEOUT_S)
            unsaid = security_pb2.DeleteAclsRequest(filters=[Acl(principal="User:orders")])
            answer = await _security(node).DeleteAcls(unsaid, timeout=TIMEOUT_S)
            assert "1 stands for any" in answer.error.message
            gone = security_pb2.DeleteAclsRequest(
                filters=[
                    Acl(
                        resource_type=Acl.ANY_RESOURCE,
                        pattern_type=Acl.ANY_PATTERN,
                        principal="User:orders",
                        operation=Acl.ANY_OPERATION,
                        permission=Acl.ANY_PERMISSION,
                    )
                ],
                validate_only=True,
            )
            answer = await _security(node).DeleteAcls(gone, timeout=TIMEOUT_S)
            assert list(answer.deleted) == [allowed]
            await _security(orders).DescribeUsers(users, timeout=TIMEOUT_S)
            gone.validate_only = False
            answer = await _security(node).DeleteAcls(gone, timeout=TIMEOUT_S)
            assert list(answer.deleted) == [allowed]
            with pytest.raises(aio.AioRpcError):
                await _security(orders).DescribeUsers(users, timeout=TIMEOUT_S)
            await _alter_users(node, [], upsertions=[_credential("orders", "secret")])
            admin = await _alter_and_log_in(others, node)
            await _security(others).DescribeUsers(users, metadata=admin, timeout=TIMEOUT_S)

    async def _alter_and_log_in(channel: aio.Channel, node: aio.Channel) -> Metadata:
        await _alter_users(node, [], upsertions=[_credential("boss", "secret")])
        return await token_of(channel, "boss", "secret")

    with Cluster(1, tls=True, config={"authorizer": "acl", "super.users": "User:boss"}) as cluster:
        asyncio.run(scenario(cluster))


def test_while_it_is_turned_on_everybody_is_let_in_and_nobody_logs_in_without_tls() -> None:
    """With listener.security.migration: clients change over one by one, and no token goes over a wire in plaintext."""

    async def scenario(cluster: Cluster) -> None:
        async with aio.insecure_channel(cluster.bootstrap) as channel:
            await _see_topics(channel, None)
            with pytest.raises(SecurityDisabled, match="passwords need a connection with TLS"):
                await log_in(channel, "admin", USERS["admin"])
            answer = await _security(channel).DescribeAcls(security_pb2.DescribeAclsRequest(), timeout=TIMEOUT_S)
            assert "authorizer = acl" in answer.error.message
        async with _channel(cluster) as channel:
            await _see_topics(channel, None)
            await _see_topics(channel, await token_of(channel, "admin", USERS["admin"]))
            assert (await _refusal(_see_topics(channel, bearer("made.up")))).startswith("TokenExpired: ")

    with Cluster(1, users=USERS, config={"listener.security.migration": True}) as cluster:
        asyncio.run(scenario(cluster))


def test_only_connections_without_a_login_are_closed_in_time() -> None:
    with Cluster(1, users=USERS, config={**STEADY, "connection.login.timeout.ms": 1_000}) as cluster:
        host, port = cluster.bootstrap.rsplit(":", 1)

        def connected() -> set[int]:
            """Return the ports of this process's connections to the server."""
            return {
                each.laddr.port
                for each in psutil.Process().net_connections("tcp")
                if each.raddr and each.raddr.port == int(port) and each.status == psutil.CONN_ESTABLISHED
            }

        config = cluster.client_config
        with Admin(cluster.bootstrap, config=config) as admin:
            admin.create_topic("t", partitions=1, replication_factor=1)
        with (
            Producer(cluster.bootstrap, config=config) as producer,
            Consumer(cluster.bootstrap, auto_offset_reset="earliest", config=config) as consumer,
        ):
            consumer.assign([TopicPartition("t", 0)])

            def read_back(value: bytes) -> None:
                producer.send("t", value)
                producer.flush(timeout=PATIENCE_S)
                deadline_s = time.monotonic() + PATIENCE_S
                while not (records := consumer.poll(0.5)):
                    assert time.monotonic() < deadline_s
                assert [record.value for record in records] == [value]

            read_back(b"before")
            before = connected()
            assert before
            for _ in range(2):  # the second one is accepted when the clients have been there for longer than the time
                with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as silent:
                    while silent.recv(4_096):
                        pass
            assert before <= connected()
            read_back(b"after")
