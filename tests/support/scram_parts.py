"""Credentials, clocks and images for tests of users, and a client's part of SCRAM."""

from __future__ import annotations

from scramp import ScramClient, ScramMechanism

from broker.security.users import Users
from raftlog.v1.security_pb2 import SCRAM_SHA_512
from raftmeta.credentials import MECHANISM_NAMES, Credential, Mechanism
from raftmeta.image import MetadataImage


class Hands:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.ms = 50_000.0

    def now_ms(self) -> int:
        """Unix time."""
        return 1_700_000_000_000

    def monotonic_ms(self) -> float:
        """Since whenever."""
        return self.ms


class Book:
    """The image of the metadata, with the users that are set; `users` finds them."""

    def __init__(self) -> None:
        self.image = MetadataImage(cluster_id="c" * 22)
        self.users = Users(lambda: self.image)
        self._offset = 0

    def set(self, user: str, password: str, mechanism: Mechanism = SCRAM_SHA_512, iterations: int = 4096) -> Credential:
        """Set a user's password, as a command would."""
        self._offset += 1
        made = credential(user, password, mechanism, self._offset, iterations)
        self.image = MetadataImage(
            cluster_id=self.image.cluster_id, credentials={**self.image.credentials, made.key: made}
        )
        return made

    def delete(self, user: str) -> None:
        """Delete a user."""
        left = {key: each for key, each in self.image.credentials.items() if key.user != user}
        self.image = MetadataImage(cluster_id=self.image.cluster_id, credentials=left)


def credential(
    user: str, password: str, mechanism: Mechanism = SCRAM_SHA_512, version: int = 1, iterations: int = 4096
) -> Credential:
    """Return the values that a password is checked with."""
    made = ScramMechanism(MECHANISM_NAMES[mechanism]).make_auth_info(password, iterations)
    salt, stored_key, server_key, _ = made
    return Credential(user, mechanism, iterations, version, salt, stored_key, server_key)


def client(user: str, password: str, mechanism: str = "SCRAM-SHA-512") -> ScramClient:
    """Return a client's end of an exchange."""
    return ScramClient([mechanism], user, password)
