"""Logins of a client at brokers (SCRAM, RFC 5802), and the tokens that its calls carry from then on.

gRPC asks for the token of every call in a thread of its own; there the login happens when there is none, and whoever
asks meanwhile waits for it. Each broker gives tokens for itself.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from raftlog import errors
from raftlog._client.sasl import Sasl
from raftlog.errors import AuthenticationFailed, BrokerUnavailable, RaftlogError, RetriableError
from raftlog.v1 import security_pb2, security_pb2_grpc

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0
"""Of each of the two calls of a login."""
RENEWED_AFTER: Final = 0.8
"""Of its lifetime a token is renewed, while it still counts."""
SECOND_TRY_S: Final = 0.25
"""A broker may not know a user yet, or a new password, that another one knows: it is asked once more after that."""
REFUSED_FOR_S: Final = 1.0
"""How long a refusal is taken for the answer to the next call, too."""
_RENEWAL_PAUSE_S: Final = 5.0
assert SECOND_TRY_S < REFUSED_FOR_S < TIMEOUT_S

FROM_PLUGIN: Final = "plugin failed with error: "
"""What gRPC writes before the text of an error that kept a call from getting its token."""
_NAMED: Final[dict[str, type[RaftlogError]]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, RaftlogError)
}
_all_logins: weakref.WeakSet[Logins] = weakref.WeakSet()

OpenChannel = Callable[[str], grpc.Channel]
"""Opens a channel to an address, whose calls need no token."""


def named_error(details: str) -> RaftlogError | None:
    """Return the error that a text names, `ClassName: what is wrong`; None where it does not."""
    name, colon, text = details.rpartition(FROM_PLUGIN)[2].partition(": ")
    found = _NAMED.get(name) if colon else None
    return None if found is None else found(text)


def forget_token(address: str) -> bool:
    """Have clients of this process log in anew at a broker before the next call; return whether one ever did."""
    logged_in = [logins.forget(address) for logins in list(_all_logins)]
    return any(logged_in)


@dataclass(slots=True)
class _Login:
    """At one broker. Its lock is held while a login goes on; only the token goes without it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    token: str = ""
    renew_s: float = 0.0
    expires_s: float = 0.0
    failure: RaftlogError | None = None
    failed_s: float = 0.0


class Logins:
    """The tokens of one client, by address. Thread-safe; never used across a fork, as no client is."""

    def __init__(self, sasl: Sasl, open_channel: OpenChannel, clock: Callable[[], float] = time.monotonic) -> None:
        """Logs nobody in yet. Raises InvalidConfig if there is no password to read."""
        sasl.read_password()
        self._sasl = sasl
        self._open_channel = open_channel
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: dict[str, _Login] = {}
        _all_logins.add(self)

    def credentials(self, address: str) -> grpc.CallCredentials:
        """Return what gives every call of a channel its token."""
        return grpc.metadata_call_credentials(_Bearer(self, address), "raftlog")

    def token(self, address: str) -> str:
        """Return the token for a broker; logs in if there is none that counts for long enough.

        Raises:
            AuthenticationFailed: the broker refuses the user, or cannot prove that it knows them.
            BrokerUnavailable: it was not reached.
            InvalidConfig: the password cannot be read any more.
        """
        asked_s = self._clock()
        login = self._login(address)
        with login.lock:
            now_s = self._clock()
            if (token := login.token) and now_s < login.renew_s:
                return token
            if login.failure is not None and self._still_counts(login, asked_s, now_s):
                raise type(login.failure)(str(login.failure))
            try:
                return self._renew(login, address)
            except RaftlogError as error:
                login.failure, login.failed_s = error, self._clock()
                token = login.token
                if not token or login.failed_s >= login.expires_s or not isinstance(error, RetriableError):
                    login.token = ""
                    raise
                login.renew_s = login.failed_s + _RENEWAL_PAUSE_S
                logger.warning("%s: %s; the token of before still counts", address, error)
                return token

    @staticmethod
    def _still_counts(login: _Login, asked_s: float, now_s: float) -> bool:
        """Whether a login that failed is the answer: it ended after this was asked, or no other is to be expected."""
        final = isinstance(login.failure, AuthenticationFailed)
        return login.failed_s > asked_s or (final and now_s < login.failed_s + REFUSED_FOR_S)

    def _renew(self, login: _Login, address: str) -> str:
        try:
            begun_s = self._clock()
            answer = self._exchange(address)
        except AuthenticationFailed:
            time.sleep(SECOND_TRY_S)
            begun_s = self._clock()
            answer = self._exchange(address)
        lifetime_s = answer.lifetime_ms / 1000
        login.token, login.failure = answer.token, None
        login.renew_s, login.expires_s = begun_s + RENEWED_AFTER * lifetime_s, begun_s + lifetime_s
        logger.debug("user %s has logged in at %s for %.0f s", self._sasl.username, address, lifetime_s)
        return answer.token

    def forget(self, address: str) -> bool:
        """Drop the token for a broker that refuses it; return whether there was ever one."""
        with self._lock:
            login = self._by_address.get(address)
        if login is None:
            return False
        login.token = ""  # not under the lock, for which a login that goes on would have the caller wait
        return True

    def _login(self, address: str) -> _Login:
        with self._lock:
            return self._by_address.setdefault(address, _Login())

    def _exchange(self, address: str) -> security_pb2.AuthenticateResponse:
        """Log in: each side proves to the other that it knows the password, which does not travel."""
        import scramp  # here: who does not log in needs no time for it

        sasl = self._sasl
        try:
            client = scramp.ScramClient([sasl.mechanism], sasl.username, sasl.read_password())
            with closing(self._open_channel(address)) as channel:
                ask = security_pb2_grpc.SecurityStub(channel).Authenticate
                first = self._ask(ask, address, client.get_client_first())
                client.set_server_first(first.message.decode())
                answer = self._ask(ask, address, client.get_client_final(), first.exchange_id)
                client.set_server_final(answer.message.decode())
        except (scramp.ScramException, UnicodeDecodeError) as error:
            raise AuthenticationFailed(
                f"the login of user {sasl.username!r} at {address} with {sasl.mechanism} failed, since the broker's "
                f"part in it is wrong ({error}): it does not know the password itself, or is of another version"
            ) from None
        if not answer.token:
            raise AuthenticationFailed(f"{address} gave user {sasl.username!r} no token: is it of another version?")
        return answer

    def _ask(self, ask: Any, address: str, message: str, exchange_id: bytes = b"") -> security_pb2.AuthenticateResponse:
        request = security_pb2.AuthenticateRequest(
            mechanism=self._sasl.mechanism, exchange_id=exchange_id, message=message.encode()
        )
        try:
            response: security_pb2.AuthenticateResponse = ask(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error, address) from None
        if response.error.code:
            refusal = errors.from_wire(response.error)
            raise refusal if isinstance(refusal, RetriableError) else self._refused(address, str(refusal))
        return response

    def _failure(self, error: Any, address: str) -> RaftlogError:
        """Return what a call that failed means for a login."""
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                found = named_error(details)
                return self._refused(address, details if found is None else str(found))
            case grpc.StatusCode.UNIMPLEMENTED:
                return self._refused(address, "it knows no users; is security.protocol right, and the port?")
            case _:  # its text tells more where the call fails that wanted the token
                return BrokerUnavailable(details)

    def _refused(self, address: str, why: str) -> AuthenticationFailed:
        sasl = self._sasl
        return AuthenticationFailed(
            f"{address} does not let user {sasl.username!r} in with {sasl.mechanism}: {why}; check {sasl.settings}"
        )


class _Bearer(grpc.AuthMetadataPlugin):
    """Gives calls to one broker their token. Called in a thread that gRPC has for this call, so it may wait."""

    def __init__(self, logins: Logins, address: str) -> None:
        self._logins = logins
        self._address = address

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        try:
            token = self._logins.token(self._address)
        except RaftlogError as error:
            callback((), RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            callback((("authorization", f"Bearer {token}"),), None)
