"""Logins: against a server of this process that speaks TLS and SCRAM, gives tokens, and refuses calls without one."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import scramp

from raftlog import Admin, Consumer, Producer
from raftlog._client import security as logins_module
from raftlog._client.connections import Connections, connections, from_grpc
from raftlog._client.options import AdminOptions, ConsumerOptions, ProducerOptions
from raftlog._client.security import Logins, Sasl, forget_token, named_error
from raftlog._client.stage_options import StageOptions
from raftlog.errors import (
    AuthenticationFailed,
    AuthorizationError,
    BrokerUnavailable,
    InvalidConfig,
    RaftlogError,
    TopicAuthorizationFailed,
)
from raftlog.testing import CertificateAuthority
from raftlog.v1 import common_pb2, security_pb2, security_pb2_grpc

NOBODY = "127.0.0.1:1"
KINDS: list[Any] = [AdminOptions, ConsumerOptions, ProducerOptions]
PASSWORD = "correct horse, battery"
LOGIN = {"security.protocol": "sasl_ssl", "sasl.username": "ada", "sasl.password": PASSWORD}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


class _Broker:
    """One user, `ada`. Its knobs are public."""

    def __init__(self) -> None:
        self.password = PASSWORD
        self.logins = 0
        self.lifetime_ms = 3_600_000
        self.forged = False
        self.unavailable = False
        self.refusals_left = 0
        self.tokens: set[str] = set()
        self.seen: list[str] = []
        self._exchanges: dict[bytes, Any] = {}
        self._lock = threading.Lock()

    def _known(self, user: str) -> Any:
        if user != "ada":
            return scramp.ScramMechanism(self.mechanism).make_auth_info("nobody has this")
        return scramp.ScramMechanism(self.mechanism).make_auth_info(self.password)

    def Authenticate(
        self, request: security_pb2.AuthenticateRequest, context: grpc.ServicerContext
    ) -> security_pb2.AuthenticateResponse:
        with self._lock:
            self.mechanism = request.mechanism
            if self.unavailable:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            if not request.exchange_id:
                server = scramp.ScramMechanism(request.mechanism).make_server(self._known)
                server.set_client_first(request.message.decode())
                exchange_id = b"%d" % len(self._exchanges)
                self._exchanges[exchange_id] = server
                return security_pb2.AuthenticateResponse(
                    exchange_id=exchange_id, message=server.get_server_first().encode()
                )
            server = self._exchanges[request.exchange_id]
            if self.refusals_left:
                self.refusals_left -= 1
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "AuthenticationFailed: no such user, or password")
            try:
                server.set_client_final(request.message.decode())
            except scramp.ScramException:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "AuthenticationFailed: no such user, or password")
            self.logins += 1
            token = f"token-{self.logins}"
            self.tokens.add(token)
            message = "v=Zm9yZ2Vk" if self.forged else server.get_server_final()
            return security_pb2.AuthenticateResponse(
                message=message.encode(), token=token, lifetime_ms=self.lifetime_ms
            )

    def check(self, context: grpc.ServicerContext) -> None:
        said = [str(value) for key, value in context.invocation_metadata() if key == "authorization"]
        self.seen += said
        if not said or said[0].removeprefix("Bearer ") not in self.tokens:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "TokenExpired: log in")


class _Service:
    """Has the one method that is called; gRPC asks for the others, too."""

    def __init__(self, broker: _Broker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return self._broker.Authenticate


class _Calls(grpc.GenericRpcHandler):
    def __init__(self, broker: _Broker) -> None:
        self._broker = broker

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        def unary(request: bytes, context: grpc.ServicerContext) -> bytes:
            self._broker.check(context)
            return request

        def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self._broker.check(context)
            for request in requests:
                self._broker.check(context)
                yield request

        match details.method:
            case "/test/unary":
                return grpc.unary_unary_rpc_method_handler(unary)
            case "/test/stream":
                return grpc.stream_stream_rpc_method_handler(stream)
        return None


@pytest.fixture
def broker() -> _Broker:
    return _Broker()


@pytest.fixture
def address(authority: CertificateAuthority, broker: _Broker) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    security_pb2_grpc.add_SecurityServicer_to_server(cast(Any, _Service(broker)), server)
    server.add_generic_rpc_handlers((_Calls(broker),))
    pem = authority.issue("broker").read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pem, pem)]))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def _settings(authority: CertificateAuthority, **more: str) -> dict[str, str]:
    return {**LOGIN, "ssl.ca.location": str(authority.ca_file), **more}


def _connections(settings: dict[str, str]) -> Connections:
    options = AdminOptions.make(settings, {})
    return connections(options.pem, options.sasl)


def _unary(made: Connections, address: str) -> Any:
    return made.channel(address).unary_unary("/test/unary")


async def _ask(made: Connections, address: str) -> bytes:
    """One call as clients make it: its failure is one of the tree."""
    try:
        return bytes(await _unary(made, address)(b"x", timeout=120))
    except grpc.aio.AioRpcError as error:
        raise from_grpc(error, address) from None


async def _asked(settings: dict[str, str], address: str) -> bytes:
    made = _connections(settings)
    try:
        return await _ask(made, address)
    finally:
        await made.close()


# Options


@pytest.mark.parametrize("kind", KINDS)
def test_a_login_is_taken_and_hidden(kind: Any) -> None:
    options = kind.make({**LOGIN, "ssl.ca.location": "ca"}, {})
    assert options.sasl == Sasl("SCRAM-SHA-512", "ada", PASSWORD)
    assert options.pem.ca == "ca"
    assert PASSWORD not in repr(options)
    assert PASSWORD not in str(options)
    assert "ada" in repr(options.sasl)
    assert pickle.loads(pickle.dumps(options.sasl)) == options.sasl  # noqa: S301 # made here
    assert kind.make({"security.protocol": "ssl"}, {}).sasl is None


def test_stages_take_it_as_producers_do() -> None:
    assert StageOptions.make(LOGIN, {}).producer.sasl == Sasl("SCRAM-SHA-512", "ada", PASSWORD)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({**LOGIN, "sasl.username": ""}, "security.protocol=sasl_ssl without sasl.username"),
        ({**LOGIN, "sasl.password": ""}, "without a password for user 'ada'; set sasl.password.location"),
        ({**LOGIN, "sasl.password.location": "f"}, "sasl.password and sasl.password.location are both set"),
        ({**LOGIN, "security.protocol": "ssl"}, "sasl.username has no effect without security.protocol=sasl_ssl"),
        ({"sasl.password": PASSWORD}, "sasl.password has no effect without security.protocol=sasl_ssl"),
        ({**LOGIN, "sasl.mechanism": "PLAIN"}, "sasl.mechanism='PLAIN': expected one of SCRAM-SHA-512, SCRAM-SHA-256"),
        ({**LOGIN, "sasl.password": 17}, r"sasl.password=\(not shown\): expected text"),
        ({"sasl.jaas.config": "x"}, "sasl.username and sasl.password.location are the login"),
        ({"sasl.kerberos.service.name": "x"}, "sasl_ssl with sasl.username"),
        ({**LOGIN, "security.protocol": "sasl_plaintext"}, "expected one of plaintext, ssl, sasl_ssl"),
    ],
)
def test_what_cannot_be_is_refused_without_the_password(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint) as caught:
        Admin(NOBODY, config=settings)
    assert PASSWORD not in str(caught.value)
    assert "17" not in str(caught.value)


@pytest.mark.parametrize("client", [Admin, Consumer, Producer])
def test_a_password_file_that_is_not_there_is_said_at_once(client: Any, tmp_path: Path) -> None:
    settings = {**LOGIN, "sasl.password": None, "sasl.password.location": str(tmp_path / "password")}
    with pytest.raises(InvalidConfig, match=r"sasl.password.location='.*password' cannot be read: No such file"):
        client(NOBODY, config=settings)
    (tmp_path / "password").write_text("\n")
    with pytest.raises(InvalidConfig, match="is empty; put the password into it"):
        client(NOBODY, config=settings)


# Calls


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "SCRAM-SHA-256"])
def test_calls_and_streams_carry_the_token_of_one_login(
    authority: CertificateAuthority, broker: _Broker, address: str, mechanism: str
) -> None:
    async def scenario() -> None:
        made = _connections(_settings(authority, **{"sasl.mechanism": mechanism}))
        assert await asyncio.gather(*(_ask(made, address) for _ in range(8))) == [b"x"] * 8
        stream: Any = made.channel(address).stream_stream("/test/stream")()
        await stream.write(b"1")
        assert await stream.read() == b"1"
        stream.cancel()
        await made.close()

    asyncio.run(scenario())
    assert broker.logins == 1
    assert set(broker.seen) == {"Bearer token-1"}


def test_a_token_that_the_broker_has_forgotten_is_replaced(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    async def scenario() -> None:
        made = _connections(_settings(authority))
        await _ask(made, address)
        broker.tokens.clear()
        with pytest.raises(BrokerUnavailable, match=f"{address} wants a new login"):
            await _ask(made, address)
        await _ask(made, address)
        await made.close()

    asyncio.run(scenario())
    assert broker.logins == 2


@pytest.mark.parametrize("change", ["password", "user"])
def test_a_wrong_password_is_final_at_once_and_names_who_and_where(
    authority: CertificateAuthority, broker: _Broker, address: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = {"sasl.username": "eve"} if change == "user" else {"sasl.password": "a wrong one, Trust No 1"}
    begun_s = time.monotonic()
    with pytest.raises(AuthenticationFailed) as caught:
        asyncio.run(_asked(_settings(authority, **wrong), address))
    assert time.monotonic() - begun_s < 40, "the refused login must fail at once, not when the time for the call is up"
    user = wrong.get("sasl.username", "ada")
    assert str(caught.value) == (
        f"{address} does not let user '{user}' in with SCRAM-SHA-512: no such user, or password; check sasl.username, "
        "sasl.password and sasl.mechanism"
    )
    for text in (str(caught.value), caplog.text):
        assert "Trust" not in text
        assert PASSWORD not in text


def test_a_broker_that_hears_of_the_user_a_moment_later_is_asked_twice(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    broker.refusals_left = 1
    assert asyncio.run(_asked(_settings(authority), address)) == b"x"


def test_a_broker_that_does_not_know_the_password_is_not_trusted(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    """RFC 5802, 3: the client authenticates the server by its signature."""
    broker.forged = True
    with pytest.raises(AuthenticationFailed, match=r"the login of user 'ada' at .* failed, because the broker"):
        asyncio.run(_asked(_settings(authority), address))
    assert not broker.seen, "the client must not call a broker whose signature is wrong"


def test_a_login_that_is_not_answered_is_a_broker_that_is_not_there(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    broker.unavailable = True
    with pytest.raises(BrokerUnavailable, match="not now"):
        asyncio.run(_asked(_settings(authority), address))


def test_the_password_is_read_again_for_the_next_login(
    authority: CertificateAuthority, broker: _Broker, address: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    settings = _settings(authority, **{"sasl.password": "", "sasl.password.location": str(file)})

    async def scenario() -> None:
        made = _connections(settings)
        await _ask(made, address)
        broker.password = "another one"
        file.write_text("another one")
        broker.tokens.clear()
        with pytest.raises(BrokerUnavailable):
            await _ask(made, address)
        await _ask(made, address)
        await made.close()

    asyncio.run(scenario())
    assert broker.logins == 2


def test_a_client_without_a_user_is_told_to_have_one(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    settings = {"security.protocol": "ssl", "ssl.ca.location": str(authority.ca_file)}
    with pytest.raises(AuthenticationFailed, match=r"set security.protocol=sasl_ssl, sasl.username"):
        asyncio.run(_asked(settings, address))


# Tokens


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _logins(authority: CertificateAuthority, clock: _Clock, opened: list[str] | None = None) -> Logins:
    credentials = grpc.ssl_channel_credentials(authority.ca_file.read_bytes())

    def opens(address: str) -> grpc.Channel:
        if opened is not None:
            opened.append(address)
        return grpc.secure_channel(address, credentials)

    return Logins(Sasl("SCRAM-SHA-512", "ada", PASSWORD), opens, clock)


def test_a_token_is_renewed_while_it_counts(authority: CertificateAuthority, broker: _Broker, address: str) -> None:
    clock = _Clock()
    made = _logins(authority, clock)
    broker.lifetime_ms = 100_000
    assert made.token(address) == "token-1"
    clock.now_s += 79
    assert made.token(address) == "token-1"
    clock.now_s += 1
    assert made.token(address) == "token-2"
    clock.now_s += 85
    broker.unavailable = True
    assert made.token(address) == "token-2", "the old token must be used, as it is still valid"
    clock.now_s += 15
    with pytest.raises(BrokerUnavailable):
        made.token(address)
    broker.unavailable = False
    clock.now_s += 1
    assert made.token(address) == "token-3"


def test_who_waits_for_a_login_shares_its_outcome(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    opened: list[str] = []
    made = _logins(authority, _Clock(), opened)
    with ThreadPoolExecutor(8) as threads:
        assert {each.result() for each in [threads.submit(made.token, address) for _ in range(8)]} == {"token-1"}
    assert opened == [address]


def test_a_refusal_answers_for_a_second(
    authority: CertificateAuthority, broker: _Broker, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins_module, "SECOND_TRY_S", 0.0)
    clock, opened = _Clock(), list[str]()
    made = _logins(authority, clock, opened)
    broker.password = "another one"
    for _ in range(3):
        clock.now_s += 0.1
        with pytest.raises(AuthenticationFailed):
            made.token(address)
    assert len(opened) == 2, "the client must have logged in twice only, with one repetition"
    broker.password = PASSWORD
    clock.now_s += 1.5
    assert made.token(address) == "token-1"


def test_every_client_forgets_a_token_that_is_refused(
    authority: CertificateAuthority, broker: _Broker, address: str
) -> None:
    some = [_logins(authority, _Clock()) for _ in range(2)]
    assert [made.token(address) for made in some] == ["token-1", "token-2"]
    assert forget_token(address)
    assert not forget_token("127.0.0.1:2"), "there must be no token of a broker at which there was no login"
    assert [made.token(address) for made in some] == ["token-3", "token-4"]


# What refusals become


class _Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "TopicAuthorizationFailed: User:a may not",
            TopicAuthorizationFailed,
            "User:a may not",
        ),
        (grpc.StatusCode.PERMISSION_DENIED, "no", AuthorizationError, "h:1: no"),
        (grpc.StatusCode.PERMISSION_DENIED, "UnknownTopicOrPartition: x", AuthorizationError, "h:1: Unknown"),
        (grpc.StatusCode.UNAUTHENTICATED, "AuthenticationFailed: who?", AuthenticationFailed, "who?"),
        (grpc.StatusCode.UNAUTHENTICATED, "who?", AuthenticationFailed, "h:1: who?"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Getting metadata from plugin failed with error: AuthenticationFailed: no: never",
            AuthenticationFailed,
            "no: never",
        ),
        (grpc.StatusCode.UNAVAILABLE, "AuthenticationFailed: said by something else", BrokerUnavailable, "no conn"),
    ],
)
def test_refusals_become_errors_of_the_tree(
    code: grpc.StatusCode, details: str, kind: type[RaftlogError], text: str
) -> None:
    error = from_grpc(_Failed(code, details), "h:1")
    assert type(error) is kind
    assert str(error).startswith(text)


def test_names_of_errors() -> None:
    assert type(named_error("AuthenticationFailed: x")) is AuthenticationFailed
    assert named_error("a text: with a colon") is None
    assert named_error("ClassVar: x") is None
    assert AuthenticationFailed.code == common_pb2.SASL_AUTHENTICATION_FAILED
