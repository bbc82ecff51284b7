"""SCRAM exchanges: the right password succeeds, once and in time; no caller learns which users exist."""

from __future__ import annotations

import base64

import pytest
from scramp import ScramMechanism

from broker.config.checks import SCRAM_MECHANISMS
from broker.observability.counters import Counters
from broker.security import scram
from broker.security.audit import Audit
from broker.security.scram import EXCHANGE_MS, FAILURES_MS, MAX_EXCHANGES, MAX_FAILURES, ScramExchanges
from raftlog.errors import AuthenticationFailed, BrokerOverloaded
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512
from tests.support.scram_parts import Book, Hands, client

WRONG = "there is no user .*, or the password is wrong"


class World:
    def __init__(self, mechanisms: tuple[str, ...] = SCRAM_MECHANISMS) -> None:
        self.book, self.clock, self.counters = Book(), Hands(), Counters()
        self.exchanges = ScramExchanges(self.book.users, mechanisms, self.clock, self.counters, Audit(self.clock))

    def begin(self, user: str, password: str, host: str = "h") -> tuple[bytes, bytes]:
        """Return an exchange, and what finishes it."""
        end = client(user, password)
        exchange_id, answer = self.exchanges.begin("SCRAM-SHA-512", end.get_client_first().encode(), host)
        end.set_server_first(answer.decode())
        return exchange_id, end.get_client_final().encode()

    def log_in(self, user: str, password: str, mechanism: str = "SCRAM-SHA-512", host: str = "h") -> str:
        """Return the user that has logged in; the client has checked the server, too."""
        end = client(user, password, mechanism)
        exchange_id, answer = self.exchanges.begin(mechanism, end.get_client_first().encode(), host)
        end.set_server_first(answer.decode())
        credential, last = self.exchanges.finish(exchange_id, end.get_client_final().encode())
        end.set_server_final(last.decode())
        return credential.user

    def salt_and_iterations(self, user: str) -> tuple[bytes, str]:
        """Return the answer to a client without the password that asks for a user."""
        _, answer = self.exchanges.begin("SCRAM-SHA-512", client(user, "x").get_client_first().encode(), "h")
        parts = dict(part.split("=", 1) for part in answer.decode().split(","))
        return base64.b64decode(parts["s"]), parts["i"]


@pytest.fixture
def world() -> World:
    made = World()
    made.book.set("alice", "secret")
    return made


def test_who_knows_the_password_gets_through(world: World) -> None:
    world.book.set("bob, a=b", "otherß", SCRAM_SHA_256)
    assert world.log_in("alice", "secret") == "alice"
    assert world.log_in("bob, a=b", "otherß", "SCRAM-SHA-256") == "bob, a=b"
    assert world.counters.authentications == {("SCRAM-SHA-512", "success"): 1, ("SCRAM-SHA-256", "success"): 1}
    assert len(world.exchanges) == 0


@pytest.mark.parametrize(
    ("user", "password", "mechanism"),
    [
        ("alice", "wrong", "SCRAM-SHA-512"),
        ("alice", "secret", "SCRAM-SHA-256"),  # there is no such credential
        ("mallory", "secret", "SCRAM-SHA-512"),
    ],
)
def test_nobody_else_does(world: World, user: str, password: str, mechanism: str) -> None:
    with pytest.raises(AuthenticationFailed, match=WRONG):
        world.log_in(user, password, mechanism)
    assert world.counters.authentications == {(mechanism, "failure"): 1}


def test_unknown_names_look_as_known_ones_do_each_time(world: World) -> None:
    known, unknown = world.salt_and_iterations("alice"), world.salt_and_iterations("mallory")
    assert len(known[0]) == len(unknown[0])
    assert world.salt_and_iterations("mallory") == unknown, (
        "the salt of an unknown name must stay the same, or it tells that the name is unknown"
    )
    assert world.salt_and_iterations("malory")[0] != unknown[0]
    elsewhere = World()
    elsewhere.book.image = world.book.image
    assert elsewhere.salt_and_iterations("mallory") == unknown, "other brokers must show the same salt"


def test_nobody_outside_can_compute_the_salt_of_an_unknown_name(world: World) -> None:
    before = world.salt_and_iterations("mallory")
    world.book.delete("alice")
    world.book.set("alice", "secret")
    assert world.salt_and_iterations("mallory") != before, (
        "the salt of an unknown name must depend on a secret that is never shown"
    )
    empty = World(), World()
    first, second = (each.salt_and_iterations("mallory") for each in empty)
    assert first != second, "without credentials each broker must use a secret of its own, as the cluster id is known"
    assert empty[0].salt_and_iterations("mallory") == first


def test_unknown_names_have_the_iterations_that_known_ones_have(world: World) -> None:
    """In proportion; and what they have stays, but for those that go over to what is new."""

    def shown() -> dict[str, tuple[int, bytes]]:
        made = [world.book.users.imitation(f"name-{number}", SCRAM_SHA_512) for number in range(400)]
        return {each.user: (each.iterations, each.salt) for each in made}

    assert {iterations for iterations, _ in shown().values()} == {4_096}, (
        "unknown names must have the iterations of alice, the only user"
    )
    assert world.salt_and_iterations("mallory")[1] == "4096"
    world.book.delete("alice")
    assert {iterations for iterations, _ in shown().values()} == {8_192}, (
        "without users unknown names must have the iterations of new users"
    )
    for number in range(9):
        world.book.set(f"user-{number}", "secret")
    before = shown()
    world.book.set("dear", "secret", iterations=20_000)
    world.book.set("other", "secret", SCRAM_SHA_256, iterations=50_000)
    after = shown()
    moved = {name for name in after if after[name] != before[name]}
    assert {iterations for iterations, _ in after.values()} == {4_096, 20_000}, (
        "only iterations of this mechanism may be shown"
    )
    assert moved == {name for name in after if after[name][0] == 20_000}
    assert 8 <= len(moved) <= 100, f"about a tenth of the unknown names must change, but {len(moved)} of 400 have"
    assert all(after[name][1] != before[name][1] for name in moved), (
        "a name whose iterations change must get a new salt, as after a change of its password"
    )


def test_an_exchange_is_finished_once_and_in_time(world: World) -> None:
    end = client("alice", "secret")
    exchange_id, answer = world.exchanges.begin("SCRAM-SHA-512", end.get_client_first().encode(), "h")
    end.set_server_first(answer.decode())
    final = end.get_client_final().encode()
    world.exchanges.finish(exchange_id, final)
    with pytest.raises(AuthenticationFailed, match="the exchange is unknown"):
        world.exchanges.finish(exchange_id, final)
    end = client("alice", "secret")
    exchange_id, answer = world.exchanges.begin("SCRAM-SHA-512", end.get_client_first().encode(), "h")
    end.set_server_first(answer.decode())
    world.clock.ms += EXCHANGE_MS
    with pytest.raises(AuthenticationFailed, match="the exchange is unknown"):
        world.exchanges.finish(exchange_id, end.get_client_final().encode())


def test_a_password_that_changes_in_between_counts(world: World) -> None:
    end = client("alice", "secret")
    exchange_id, answer = world.exchanges.begin("SCRAM-SHA-512", end.get_client_first().encode(), "h")
    end.set_server_first(answer.decode())
    world.book.set("alice", "changed")
    with pytest.raises(AuthenticationFailed, match=WRONG):
        world.exchanges.finish(exchange_id, end.get_client_final().encode())


def test_a_proof_is_of_one_exchange(world: World) -> None:
    ids, finals = [], []
    for _ in range(2):
        end = client("alice", "secret")
        exchange_id, answer = world.exchanges.begin("SCRAM-SHA-512", end.get_client_first().encode(), "h")
        end.set_server_first(answer.decode())
        ids.append(exchange_id)
        finals.append(end.get_client_final().encode())
    with pytest.raises(AuthenticationFailed, match=WRONG):
        world.exchanges.finish(ids[0], finals[1])


@pytest.mark.parametrize(
    "message", [b"", b"n,,", b"n,,n=alice", b"\xff", b"n,,n=,r=abc", b"p=tls-unique,,n=a,r=b", b"x" * 5000]
)
def test_what_is_no_message_is_refused(world: World, message: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="the message is not a first message of SCRAM-SHA-512"):
        world.exchanges.begin("SCRAM-SHA-512", message, "h")
    exchange_id, _ = world.exchanges.begin("SCRAM-SHA-512", client("alice", "x").get_client_first().encode(), "h")
    with pytest.raises(AuthenticationFailed, match=WRONG):
        world.exchanges.finish(exchange_id, message)
    assert len(world.exchanges) == 0


def test_names_are_as_long_as_those_of_users(world: World) -> None:
    world.book.set(",=" * 127 + ",", "secret")
    assert world.log_in(",=" * 127 + ",", "secret")
    with pytest.raises(AuthenticationFailed, match="the name is too long"):
        world.log_in("a" * 256, "secret")


def test_mechanisms_that_are_not_enabled_are_refused() -> None:
    world = World(("SCRAM-SHA-512",))
    world.book.set("alice", "secret", SCRAM_SHA_256)
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-1", "PLAIN", "SCRAM-SHA-512-PLUS"):
        with pytest.raises(AuthenticationFailed, match="is not enabled here; this broker takes SCRAM-SHA-512"):
            world.exchanges.begin(mechanism, b"", "h")
    assert world.counters.authentications == {("other", "failure"): 4}


@pytest.mark.parametrize(
    "name",
    ["\ufdfa" * 255, "\ufdfa" * 85 + "=2C", "\uff41lice", "A\u030angstrom"],
    ids=("all", "escaped", "wide", "parts"),
)
def test_names_of_which_saslprep_makes_others_do_not_get_that_far(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U+FDFA becomes 18 characters, and SASLprep looks at each of them: 255 took 16 ms, for any client."""
    reached = 0

    def mechanism(name: str) -> ScramMechanism:
        nonlocal reached
        reached += 1
        return ScramMechanism(name)

    monkeypatch.setattr(scram, "ScramMechanism", mechanism)
    with pytest.raises(AuthenticationFailed, match="not in Unicode's form NFKC"):
        world.exchanges.begin("SCRAM-SHA-512", f"n,,n={name},r=abcdefghijkl".encode(), "h")
    assert reached == 0
    assert world.counters.authentications == {("SCRAM-SHA-512", "failure"): 1}
    assert world.log_in("alice", "secret") == "alice"
    assert reached == 1


@pytest.mark.parametrize("loud", [["10.0.0.1"], [f"2001:db8::{each:x}" for each in range(500)]], ids=("one", "/64"))
def test_one_network_cannot_keep_others_from_authenticating(world: World, loud: list[str]) -> None:
    """A client that begins many exchanges ends its own."""
    world.book.set("bob", "secret")
    quiet = world.begin("bob", "secret", "10.0.0.2")
    first = client("alice", "secret").get_client_first().encode()
    for number in range(MAX_EXCHANGES * 2):
        world.exchanges.begin("SCRAM-SHA-512", first, loud[number % len(loud)])
    assert len(world.exchanges) == scram.MAX_EXCHANGES_OF_NETWORK + 1
    assert world.log_in("alice", "secret", host=loud[0]) == "alice", (
        "a login from the flooding network must still be possible"
    )
    assert world.exchanges.finish(*quiet)[0].user == "bob"


def test_many_networks_take_the_oldest_exchanges_of_all(world: World) -> None:
    oldest, next_oldest = world.begin("alice", "secret", "quiet"), world.begin("alice", "secret", "quiet")
    first = client("alice", "secret").get_client_first().encode()
    for number in range(MAX_EXCHANGES - 1):
        world.exchanges.begin("SCRAM-SHA-512", first, f"loud-{number}")
    assert len(world.exchanges) == MAX_EXCHANGES
    assert world.exchanges.finish(*next_oldest)[0].user == "alice"
    with pytest.raises(BrokerOverloaded, match="too many clients"):  # no reason to believe the password to be wrong
        world.exchanges.finish(*oldest)
    assert world.log_in("alice", "secret", host="another") == "alice"
    world.clock.ms += EXCHANGE_MS
    assert len(world.exchanges) == 0
    assert world.exchanges._of_network == {}


# Guesses


def fail(world: World, user: str, times: int, hosts: tuple[str, ...] = ("h",)) -> None:
    """Give wrong passwords."""
    for number in range(times):
        with pytest.raises(AuthenticationFailed, match=WRONG):
            world.log_in(user, "wrong", host=hosts[number % len(hosts)])


@pytest.mark.parametrize("user", ["alice", "mallory"])
def test_a_network_has_so_many_guesses_a_minute(world: World, user: str) -> None:
    """No client may learn whether the user exists."""
    fail(world, user, MAX_FAILURES, ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2"))
    with pytest.raises(BrokerOverloaded, match=f"logins of user '{user}' from 2001:db8:0:1::/64 .* wait a minute"):
        world.begin(user, "secret", "2001:db8:0:1::3")
    with pytest.raises(BrokerOverloaded):
        world.begin(f"{user}\xad", "secret", "2001:db8:0:1::3")  # which SASLprep makes the same of
    fail(world, user, 1, ("2001:db8:0:2::1",))
    world.book.set("bob", "secret")
    assert world.log_in("bob", "secret", host="2001:db8:0:1::1") == "bob"
    world.book.set(user, "secret")
    assert world.log_in(user, "secret") == user, "the user must be able to log in from another network"
    world.clock.ms += FAILURES_MS
    assert world.log_in(user, "secret", host="2001:db8:0:1::1") == user


def test_exchanges_that_have_begun_already_are_no_more_guesses(world: World) -> None:
    begun = [world.begin("alice", "wrong") for _ in range(MAX_FAILURES + 5)]
    right = world.begin("alice", "secret")
    outcomes = []
    for each in [*begun, right]:
        with pytest.raises((AuthenticationFailed, BrokerOverloaded)) as caught:
            world.exchanges.finish(*each)
        outcomes.append(caught.type)
    assert outcomes == [AuthenticationFailed] * MAX_FAILURES + [BrokerOverloaded] * 6
    assert world.counters.authentications == {("SCRAM-SHA-512", "failure"): MAX_FAILURES}


def test_who_knows_the_password_has_all_guesses_again(world: World) -> None:
    for _ in range(2):
        fail(world, "alice", MAX_FAILURES - 1)
        assert world.log_in("alice", "secret") == "alice"


def test_the_failures_that_are_remembered_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scram, "MAX_COUNTED", 3)
    for number in range(10):
        fail(world, f"user-{number}", 1)
    assert [user for user, _ in world.exchanges._failures._failed] == ["user-7", "user-8", "user-9"]
    world.clock.ms += FAILURES_MS
    fail(world, "alice", 1)
    assert list(world.exchanges._failures._failed) == [("alice", "h")]
