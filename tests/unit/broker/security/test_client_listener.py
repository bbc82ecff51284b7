"""What is put together, and what it says at the start that is hardly meant."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from broker.config.config import BrokerConfig
from broker.observability.counters import Counters
from broker.security import client_listener, identify
from broker.security.caller import caller
from broker.security.client_listener import UNKNOWN_HOST, ClientSecurity
from broker.security.identify import AUTHENTICATE, Login
from raftlog._core.security.acls import Acl, canonical_host, check_acl
from raftlog.errors import AuthenticationFailed, BrokerOverloaded, InvalidConfig, InvalidRequestError, SecurityDisabled
from raftlog.v1.security_pb2 import SCRAM_SHA_512, AuthenticateResponse
from raftlog.v1.security_pb2 import Acl as WireAcl
from tests.support.logged import lines_of
from tests.support.scram_parts import Book, Hands, client

TLS = {"ssl.keystore.location": "node.pem", "ssl.truststore.location": "ca.pem"}
SASL = {"listener.security.protocol": "sasl_ssl", **TLS}
NODES = {"controller.quorum.voters": "1@10.0.0.1:9093", "cluster.id": "c" * 22}


def made(book: Book, **values: object) -> ClientSecurity:
    keys = {name.replace("_", "."): value for name, value in values.items()}
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **keys})
    return ClientSecurity(config, lambda: book.image, Hands(), Counters())


class Context:
    def __init__(self, *, tls: bool = True) -> None:
        self._tls = tls

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [b"ssl"]} if self._tls else {}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:4321"


def log_in(security: ClientSecurity, user: str, password: str, context: Any) -> Login | None:
    end = client(user, password)
    answer = security.begin("SCRAM-SHA-512", end.get_client_first().encode(), context)
    end.set_server_first(answer.message.decode())
    answer = security.finish(answer.exchange_id, end.get_client_final().encode(), context)
    end.set_server_final(answer.message.decode())
    return security._tokens.read(answer.token)


def test_a_user_that_is_shut_out_cannot_log_in_and_only_it_learns_why() -> None:
    book = Book()
    book.set("mallory", "secret")
    security = made(book, **SASL)
    asked: list[tuple[str, str]] = []

    def shut_out(principal: str, host: str) -> BrokerOverloaded | None:
        asked.append((principal, host))
        return BrokerOverloaded("come back in 60 s") if principal == "User:mallory" else None

    security.shut_out = shut_out
    with pytest.raises(BrokerOverloaded, match="60 s"):
        log_in(security, "mallory", "secret", Context())
    assert asked == [("User:mallory", "10.0.0.1")]
    with pytest.raises(AuthenticationFailed):
        log_in(security, "mallory", "a guess", Context())
    assert len(asked) == 1


def test_who_is_logged_in_is_counted_while_others_log_in() -> None:
    """A scrape counts on a thread of its own: streams and connections begin and end meanwhile."""
    security = made(Book(), **SASL)
    assert security.interceptor is not None
    login = Login("alice", SCRAM_SHA_512, 1, 0)

    class Arriving:
        """While it is looked at, another one begins."""

        certificate = b""

        def __init__(self, among: set[Any]) -> None:
            self._among = among

        @property
        def login(self) -> Login:
            self._among.add(Arriving(self._among))
            return login

        def end(self) -> None:
            raise AssertionError("nothing ends here")

    connections: set[Any] = security.connections
    streams: set[Any] = security.interceptor._streams
    for among in (connections, streams):
        among.add(Arriving(among))
    assert security.count_authenticated() == 2


def test_rules_name_the_users_of_certificates() -> None:
    class WithCertificate(Context):
        def auth_context(self) -> dict[str, list[bytes]]:
            return {**super().auth_context(), "x509_subject": [b"CN=Orders,O=Example"], "x509_common_name": [b"Orders"]}

    ssl = {
        "listener_security_protocol": "ssl",
        "ssl_keystore_location": "node.pem",
        "ssl_truststore_location": "ca.pem",
    }
    for rules, principal in (("DEFAULT", "User:Orders"), ("RULE:CN=(.*),O=Example/$1/L", "User:orders")):
        interceptor = made(Book(), **ssl, ssl_principal_mapping_rules=rules).interceptor
        assert interceptor is not None
        found = interceptor._caller(identify._NO_LOGIN, WithCertificate(), open_to_all=False)
        assert found.principal == principal


def test_where_nothing_is_secured_nothing_is_looked_at() -> None:
    security = made(Book())
    assert security.interceptor is None
    assert security.authorizer is None
    with pytest.raises(SecurityDisabled, match=r"listener\.security\.protocol = plaintext"):
        security.begin("SCRAM-SHA-512", b"", Context())


def test_an_authorizer_alone_makes_everybody_anonymous() -> None:
    security = made(Book(), authorizer="acl")
    assert security.interceptor is not None
    assert security.authorizer is not None


def test_passwords_are_for_connections_with_tls(tmp_path: Path) -> None:
    """While TLS is turned on there are others; a token would go back in plaintext."""
    users = tmp_path / "users.toml"
    users.write_text('admin = "secret"\n')
    security = made(Book(), **SASL, listener_security_migration=True, sasl_users_location=str(users))
    with pytest.raises(SecurityDisabled, match="a connection with TLS"):
        log_in(security, "admin", "secret", Context(tls=False))
    login = log_in(security, "admin", "secret", Context())
    assert login is not None
    assert login.user == "admin"


def test_a_broker_that_asks_for_none_takes_passwords_all_the_same() -> None:
    """So clients can change over before it asks."""
    book = Book()
    book.set("alice", "secret")
    login = log_in(made(book, listener_security_protocol="ssl", **TLS), "alice", "secret", Context())
    assert login is not None
    assert login.user == "alice"


@pytest.mark.parametrize("migration", [False, True])
def test_while_all_connections_come_from_the_proxy_no_acl_can_name_their_host(migration: bool) -> None:
    """Else an ACL for 127.0.0.1, meant for local users, would apply to all."""
    security = made(
        Book(), **SASL, authorizer="acl", super_users="User:root", listener_security_migration=migration, insecure=True
    )
    interceptor = security.interceptor
    assert interceptor is not None
    hosts = []

    async def call(request: bytes, context: Any) -> AuthenticateResponse:
        hosts.append(caller.get().host)
        return AuthenticateResponse()

    async def scenario() -> None:
        server = aio.server(interceptors=[interceptor])
        method: Any = grpc.unary_unary_rpc_method_handler(
            call, response_serializer=AuthenticateResponse.SerializeToString
        )
        service, _, name = AUTHENTICATE.strip("/").partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = channel.unary_unary(AUTHENTICATE)
            await stub(b"", timeout=60)
        await server.stop(0)

    asyncio.run(scenario())
    assert hosts == [UNKNOWN_HOST if migration else "127.0.0.1"]


def test_the_unknown_host_can_be_in_no_acl() -> None:
    acl = Acl(WireAcl.TOPIC, "t", WireAcl.LITERAL, "User:a", "127.0.0.1", WireAcl.READ, WireAcl.ALLOW)
    check_acl(acl)
    with pytest.raises(InvalidRequestError, match="the host of an ACL is an IP address"):
        check_acl(replace(acl, host=UNKNOWN_HOST))
    assert canonical_host(UNKNOWN_HOST) == UNKNOWN_HOST


def test_a_file_that_is_no_good_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"sasl\.users\.location"):
        made(Book(), **SASL, sasl_users_location=str(tmp_path / "nowhere"))


def test_changes_are_looked_for_in_the_metadata_and_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "users.toml"
    users.write_text('admin = "secret"\n')
    book = Book()
    security = made(book, **SASL, sasl_users_location=str(users))
    assert security.interceptor is not None
    checked = 0
    seen = asyncio.Event()

    def check() -> int:
        nonlocal checked
        checked += 1
        seen.set()
        return 0

    monkeypatch.setattr(security.interceptor, "check", check)
    monkeypatch.setattr(client_listener, "LOOK_EVERY_S", 0.01)
    security.on_metadata(book.image)
    assert checked == 0
    book.set("alice", "secret")
    security.on_metadata(book.image)
    security.on_metadata(book.image)
    assert checked == 1

    async def scenario() -> None:
        watching = asyncio.create_task(security.watch())
        seen.clear()
        another = tmp_path / "another.toml"
        another.write_text('admin = "another secret"\n')
        another.replace(users)
        await asyncio.wait_for(seen.wait(), 60)
        assert security._users.find("admin", SCRAM_SHA_512) is not None
        seen.clear()
        users.unlink()
        await asyncio.wait_for(seen.wait(), 60)
        assert security._users.find("admin", SCRAM_SHA_512) is None
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(scenario())


def test_looks_that_fail_are_logged_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    users = tmp_path / "users.toml"
    users.write_text('admin = "secret"\n')
    security = made(Book(), **SASL, sasl_users_location=str(users))
    monkeypatch.setattr(client_listener, "LOOK_EVERY_S", 0.001)
    looked = ended = 0
    enough = asyncio.Event()

    class Lists:
        async def fresh(self) -> None:
            raise ValueError("damaged")

    def look() -> bool:
        nonlocal looked
        looked += 1
        return False

    def end_streams() -> None:
        nonlocal ended
        ended += 1
        if ended == 3:
            enough.set()
        raise ValueError("damaged")

    security.revoked = Lists()  # type: ignore[assignment] # the part that is watched
    monkeypatch.setattr(security._users.file, "look", look)
    monkeypatch.setattr(security, "_end_streams", end_streams)

    async def scenario() -> None:
        watching = asyncio.create_task(security.watch())
        waiting = asyncio.create_task(enough.wait())
        await asyncio.wait((watching, waiting), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert not watching.done()
        for task in (watching, waiting):
            task.cancel()
        await asyncio.gather(watching, waiting, return_exceptions=True)

    asyncio.run(scenario())
    assert looked >= 3
    assert len([line for line in lines_of(caplog, client_listener.__name__) if "a look at the users" in line]) == 1


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        ({}, []),
        ({**SASL, "authorizer": "acl", "super.users": "User:root"}, []),
        ({**SASL, "authorizer": "acl"}, ["authorizer=acl without super.users"]),
        ({"listener.security.protocol": "ssl", **TLS, "authorizer": "acl"}, []),  # nodes have certificates
        (
            {"listeners": "10.0.0.1:9092", "insecure": True, "authorizer": "acl", "super.users": "User:root"},
            ["clients need not authenticate"],
        ),
        ({"authorizer": "acl", "super.users": "User:root"}, []),  # on loopback
        (
            {
                **SASL,
                "listeners": "10.0.0.1:9092",
                "insecure": True,
                "listener.security.migration": True,
                "authorizer": "acl",
                "super.users": "User:root",
            },
            ["clients need not authenticate"],
        ),
        (
            {**SASL, **NODES, "authorizer": "acl", "super.users": "User:root"},
            [],
        ),
        (
            {
                **SASL,
                **NODES,
                "security.inter.broker.protocol": "plaintext",
                "insecure": True,
                "authorizer": "acl",
                "super.users": "User:root",
            },
            ["any client that reaches inter.node.listener may do everything"],
        ),
        (
            {
                **SASL,
                **NODES,
                "listener.security.migration": True,
                "insecure": True,
                "authorizer": "acl",
                "super.users": "User:root",
            },
            ["any client that reaches inter.node.listener may do everything"],
        ),
        (
            {
                **SASL,
                **NODES,
                "security.inter.broker.protocol": "plaintext",
                "insecure": True,
            },
            [],  # no permissions to circumvent
        ),
        (
            {
                **SASL,
                **NODES,
                "inter.node.listener": "127.0.0.1:19093",
                "security.inter.broker.protocol": "plaintext",
                "authorizer": "acl",
                "super.users": "User:root",
            },
            [],
        ),
        (
            {
                "listener.security.protocol": "ssl",
                **TLS,
                "ssl.client.auth": "none",
                "listeners": "10.0.0.1:9092",
                "authorizer": "acl",
                "super.users": "User:root",
            },
            ["clients need not authenticate"],
        ),
    ],
)
def test_what_is_hardly_meant_is_said(
    values: dict[str, object], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    book = Book()
    book.set("root", "secret")
    with caplog.at_level(logging.WARNING):
        made(book, **values)
    lines = lines_of(caplog, "broker")
    assert len(lines) == len(warnings)
    assert all(words in said for words, said in zip(warnings, lines, strict=True))


def test_who_asks_for_passwords_and_knows_none_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    users = tmp_path / "users.toml"
    users.write_text("")
    made(Book(), **SASL, sasl_users_location=str(users))
    assert "there are no users yet, so no client can log in: set sasl.users.location" in caplog.text
    caplog.clear()
    users.write_text('admin = "secret"\n')
    made(Book(), **SASL, sasl_users_location=str(users))
    made(Book(), **SASL, ssl_client_auth="required")  # nodes can make some
    assert not lines_of(caplog, "broker")
