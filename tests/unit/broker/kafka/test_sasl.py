"""How Kafka clients get in: the exchanges, who they are then, and what strangers may do until then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.config.config import BrokerConfig
from broker.kafka import sasl
from broker.kafka.codec import Fields
from broker.kafka.sasl import Door, NotAdmitted, Session
from broker.observability.counters import Counters
from broker.security.client_listener import ClientSecurity
from broker.security.identify import principal_of_certificate
from broker.security.scram import FailureDelay
from raftlog.errors import BrokerOverloaded, RaftlogError
from raftlog.v1.security_pb2 import SCRAM_SHA_256
from tests.support.issuer import AUDIENCE, ISSUER, Issuer, message_of
from tests.support.scram_parts import Book, Hands, client

HOST = "10.0.0.7"


class World:
    """A door with its users and a clock that tests move."""

    def __init__(self, session_ms: int = 0, protocol: str = "sasl_ssl") -> None:
        self.book = Book()
        self.clock = Hands()
        self.counters = Counters()
        config = BrokerConfig.from_values(
            {"node.id": 1, "log.dirs": "/data", "listeners": "127.0.0.1:1,kafka+sasl://127.0.0.1:2"}
        )
        self.security = ClientSecurity(config, lambda: self.book.image, self.clock, self.counters)
        self.door = Door(
            protocol,
            security=self.security,
            mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"),
            session_ms=session_ms,
            clock=self.clock,
            counters=self.counters,
            max_strangers=3,
        )

    def session(self) -> Session:
        return self.door.session(HOST, None)


async def plain(session: Session, user: str, password: str) -> Fields:
    assert session.handshake({"mechanism": "PLAIN"}, 1)["error_code"] == 0
    return await session.authenticate({"auth_bytes": f"\0{user}\0{password}".encode()})


async def scram(session: Session, user: str, password: str, mechanism: str = "SCRAM-SHA-512") -> Fields:
    end = client(user, password, mechanism)
    assert session.handshake({"mechanism": mechanism}, 1)["error_code"] == 0
    first = await session.authenticate({"auth_bytes": end.get_client_first().encode()})
    assert first["error_code"] == 0
    assert first["session_lifetime_ms"] == 0
    end.set_server_first(first["auth_bytes"].decode())
    answer = await session.authenticate({"auth_bytes": end.get_client_final().encode()})
    if not answer["error_code"]:
        end.set_server_final(answer["auth_bytes"].decode())
    return answer


@pytest.mark.parametrize("way", [plain, scram])
def test_the_right_password_admits(way: Callable[[Session, str, str], Awaitable[Fields]]) -> None:
    async def scenario() -> None:
        world = World()
        world.book.set("ada", "secret")
        session = world.session()
        assert (session.who.principal, session.is_admitted) == ("User:ANONYMOUS", False)
        assert (await way(session, "ada", "secret"))["error_code"] == 0
        assert session.is_admitted
        assert (session.who.principal, session.who.host) == ("User:ada", HOST)
        assert session.login is not None
        assert world.security.is_current(session.login)
        world.book.set("ada", "changed")
        assert not world.security.is_current(session.login)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("way", "user", "password"),
    [
        (plain, "ada", "wrong"),
        (plain, "stranger", "secret"),
        (plain, "ada", "\x07"),
        (scram, "ada", "wrong"),
        (scram, "stranger", "secret"),
    ],
)
def test_a_wrong_one_does_not(
    way: Callable[[Session, str, str], Awaitable[Fields]],
    user: str,
    password: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "raftlog.audit")

    async def scenario() -> None:
        world = World()
        world.book.set("ada", "secret")
        session = world.session()
        answer = await way(session, user, password)
        assert answer["error_code"] == 58
        assert answer["error_message"] == f"there is no user {user!r}, or the password is wrong"
        assert session.closing
        assert not session.is_admitted
        mechanism = "PLAIN" if way is plain else "SCRAM-SHA-512"
        assert world.counters.authentications == {(mechanism, "failure"): 1}
        (line,) = [each for each in caplog.records if each.name == "raftlog.audit"]
        assert vars(line)["principal"] == f"User:{user}"
        assert vars(line)["host"] == HOST

    asyncio.run(scenario())


@pytest.mark.parametrize("way", [plain, scram])
def test_a_user_that_is_shut_out_is_disconnected_after_a_while_and_only_it_learns_that(
    way: Callable[[Session, str, str], Awaitable[Fields]],
) -> None:
    async def scenario() -> None:
        world = World(session_ms=60_000)
        world.book.set("ada", "secret")
        world.book.set("eve", "secret")
        before = world.session()
        await way(before, "ada", "secret")
        asked: list[tuple[str, str]] = []
        delayed: list[RaftlogError] = []

        def shut_out(principal: str, host: str) -> BrokerOverloaded | None:
            asked.append((principal, host))
            return BrokerOverloaded("come back in 60 s") if principal == "User:ada" else None

        class Delay(FailureDelay):
            async def of(self, error: RaftlogError) -> RaftlogError:
                delayed.append(error)
                return error

        world.security.shut_out = shut_out
        world.door.delay = Delay()
        session = world.session()
        assert (await way(session, "ada", "wrong"))["error_code"] == 58
        assert not asked, "a guess must not learn who is shut out"
        delayed.clear()
        session = world.session()
        with pytest.raises(NotAdmitted, match="60 s"):
            await way(session, "ada", "secret")
        assert not session.is_admitted
        assert session.login is None
        assert asked == [("User:ada", HOST)]
        assert len(delayed) == 1, "clients that come back at once must not do so without a pause"
        with pytest.raises(NotAdmitted, match="60 s"):
            await way(before, "ada", "secret")  # it authenticates again
        assert (await way(world.session(), "eve", "secret"))["error_code"] == 0

    asyncio.run(scenario())


def test_plain_takes_whichever_credential_there_is() -> None:
    async def scenario() -> None:
        world = World()
        world.book.set("ada", "secret", SCRAM_SHA_256)
        assert (await plain(world.session(), "ada", "secret"))["error_code"] == 0

    asyncio.run(scenario())


def test_both_ways_share_the_number_of_guesses() -> None:
    async def scenario() -> None:
        world = World()
        world.book.set("ada", "secret")
        for _ in range(10):
            assert (await plain(world.session(), "ada", "wrong"))["error_code"] == 58
            assert (await scram(world.session(), "ada", "wrong"))["error_code"] == 58
        with pytest.raises(NotAdmitted, match="20 times within a minute"):
            await plain(world.session(), "ada", "secret")
        with pytest.raises(NotAdmitted, match="20 times within a minute"):
            await scram(world.session(), "ada", "secret")
        world.clock.ms += 61_000
        assert (await plain(world.session(), "ada", "secret"))["error_code"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("message", [b"", b"\0ada", b"\0ada\0secret\0", b"\xff\0ada\0secret", b"\0" * 5_000])
def test_what_is_not_plain_is_refused(message: bytes) -> None:
    async def scenario() -> None:
        session = World().session()
        session.handshake({"mechanism": "PLAIN"}, 1)
        assert (await session.authenticate({"auth_bytes": message}))["error_code"] == 58

    asyncio.run(scenario())


def test_nobody_acts_for_another_user() -> None:
    async def scenario() -> None:
        world = World()
        world.book.set("ada", "secret")
        session = world.session()
        session.handshake({"mechanism": "PLAIN"}, 1)
        assert (await session.authenticate({"auth_bytes": b"admin\0ada\0secret"}))["error_code"] == 58

    asyncio.run(scenario())


def test_a_session_ends_unless_the_same_user_authenticates_again() -> None:
    async def scenario() -> None:
        world = World(session_ms=1_000)
        world.book.set("ada", "secret")
        world.book.set("eve", "secret")
        session = world.session()
        answer = await scram(session, "ada", "secret")
        assert answer["session_lifetime_ms"] == 1_000
        world.clock.ms += 900
        session.check_request("Fetch", 100, authenticates=False)
        assert (await scram(session, "ada", "secret"))["session_lifetime_ms"] == 1_000
        world.clock.ms += 900
        session.check_request("Fetch", 100, authenticates=False)
        world.clock.ms += 200
        with pytest.raises(NotAdmitted, match="has ended"):
            session.check_request("Fetch", 100, authenticates=False)
        session.check_request("SaslHandshake", 100, authenticates=True)
        assert session.handshake({"mechanism": "PLAIN"}, 1) == {"error_code": 33, "mechanisms": ["SCRAM-SHA-512"]}
        session.closing = ""
        answer = await scram(session, "eve", "secret")
        assert answer["error_code"] == 58
        assert "User:ada's" in answer["error_message"]
        assert session.who.principal == "User:ada"

    asyncio.run(scenario())


def test_sessions_without_an_end_are_not_renewed() -> None:
    async def scenario() -> None:
        world = World()
        world.book.set("ada", "secret")
        session = world.session()
        await plain(session, "ada", "secret")
        world.clock.ms += 1e9
        session.check_request("Fetch", 100, authenticates=False)
        assert session.handshake({"mechanism": "PLAIN"}, 1)["error_code"] == 34
        assert not session.closing

    asyncio.run(scenario())


def test_strangers_send_little() -> None:
    world = World()
    with pytest.raises(NotAdmitted, match="before authentication: Fetch"):
        world.session().check_request("Fetch", 100, authenticates=False)
    assert world.counters.unauthenticated_calls == 1
    with pytest.raises(NotAdmitted, match="at most"):
        world.session().check_request("SaslAuthenticate", sasl.MAX_BEFORE_BYTES + 1, authenticates=True)
    session = world.session()
    for _ in range(sasl.MAX_BEFORE):
        session.check_request("ApiVersions", 10, authenticates=True)
    with pytest.raises(NotAdmitted, match="more than"):
        session.check_request("ApiVersions", 10, authenticates=True)


def test_a_listener_without_passwords_says_so() -> None:
    session = sasl.OPEN.session(HOST, None)
    assert session.is_admitted
    assert session.handshake({"mechanism": "PLAIN"}, 1) == {"error_code": 34, "mechanisms": []}
    assert asyncio.run(session.authenticate({"auth_bytes": b""}))["error_code"] == 34
    assert not session.closing


@pytest.mark.parametrize(
    ("certificate", "principal"),
    [
        ({}, "User:ANONYMOUS"),
        ({"subject": ((("commonName", "ada"),),)}, "User:ada"),
        ({"subject": ((("organizationName", "x"),), (("commonName", "*"),))}, "User:ANONYMOUS"),
        ({"subject": ((("commonName", "a"),), (("commonName", "b"),))}, "User:ANONYMOUS"),
        ({"subject": ((("commonName", "raftlog-node-3"),),)}, "Node:3"),
        ({"subject": ((("commonName", "a"),),), "subjectAltName": (("URI", "raftlog://node/2"),)}, "Node:2"),
        ({"subject": ((("commonName", "a"),),), "subjectAltName": (("DNS", "raftlog://node/2"),)}, "User:a"),
    ],
)
def test_the_principal_of_a_certificate(certificate: dict[str, object], principal: str) -> None:
    assert principal_of_certificate(certificate) == principal


def test_a_token_of_an_issuer_admits_until_it_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        issuer, clock, counters = Issuer(), Hands(), Counters()
        config = BrokerConfig.from_values(
            {
                "node.id": 1,
                "log.dirs": "/data",
                "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
                "sasl.oauthbearer.jwks.endpoint.url": issuer.write(tmp_path / "keys.json"),
                "sasl.oauthbearer.expected.issuer": ISSUER,
                "sasl.oauthbearer.expected.audience": AUDIENCE,
            }
        )
        security = ClientSecurity(config, lambda: Book().image, clock, counters)
        door = Door("sasl_ssl", security=security, mechanisms=("OAUTHBEARER",), clock=clock, counters=counters)

        async def show(session: Session, token: str) -> Fields:
            assert session.handshake({"mechanism": "OAUTHBEARER"}, 1)["error_code"] == 0
            return await session.authenticate({"auth_bytes": message_of(token)})

        refused = door.session(HOST, None)
        assert (await show(refused, issuer.token(aud="another cluster")))["error_code"] == 58
        assert not refused.is_admitted
        session = door.session(HOST, None)
        answer = await show(session, issuer.token("ada", lifetime_s=600))
        assert answer["error_code"] == 0
        assert 0 < answer["session_lifetime_ms"] <= 631_000
        assert session.who.principal == "User:ada"
        assert session.login is not None
        assert security.is_current(session.login)
        session.check_request("Metadata", 100, authenticates=False)
        assert (await show(session, issuer.token("ada", lifetime_s=86_400)))["error_code"] == 0, (
            "the user must be able to log in again with a new token"
        )
        clock.ms += 700_000
        assert security.is_current(session.login)
        session.check_request("Metadata", 100, authenticates=False)
        assert (await show(session, issuer.token("eve")))["error_code"] == 58, (
            "a login of another user over the same connection must be refused"
        )
        clock.ms += 90_000_000
        assert not security.is_current(session.login)
        with pytest.raises(NotAdmitted, match="ended"):
            session.check_request("Metadata", 100, authenticates=False)

    asyncio.run(scenario())
