"""What is kept of passwords (RFC 5802): enough to check one, not to log in with. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from raftlog.v1 import records_pb2, security_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512, ScramMechanism

Mechanism: TypeAlias = ScramMechanism.ValueType

KEY_BYTES: Final = {SCRAM_SHA_256: 32, SCRAM_SHA_512: 64}
"""Length of both keys, by mechanism; in the order of the mechanisms' numbers. Others are not known here."""
MECHANISM_NAMES: Final = {SCRAM_SHA_256: "SCRAM-SHA-256", SCRAM_SHA_512: "SCRAM-SHA-512"}
"""As clients name them (RFC 7677)."""


class CredentialKey(NamedTuple):
    """A user has at most one credential of each mechanism."""

    user: str
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class Credential:
    """A user's credential. `version`: the metadata offset at which it was set, so another one has another version.

    Who learns the keys can pretend to be the server and try passwords out, so they are never shown.
    """

    user: str
    mechanism: Mechanism
    iterations: int
    version: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @property
    def key(self) -> CredentialKey:
        """Where it stands in `MetadataImage.credentials`."""
        return CredentialKey(self.user, self.mechanism)

    @classmethod
    def from_wire(cls, wire: security_pb2.ScramCredential, version: int) -> Credential:
        """Return what a message says, as it is; nothing is checked."""
        return cls(wire.user, wire.mechanism, wire.iterations, version, wire.salt, wire.stored_key, wire.server_key)

    def to_wire(self) -> security_pb2.ScramCredential:
        """Return it as it travels and rests, without its version."""
        return security_pb2.ScramCredential(
            user=self.user,
            mechanism=self.mechanism,
            iterations=self.iterations,
            salt=self.salt,
            stored_key=self.stored_key,
            server_key=self.server_key,
        )

    def to_record(self) -> MetadataRecord:
        """Return the record that sets it, in place of another one of its key."""
        return MetadataRecord(
            scram_credential=records_pb2.ScramCredentialRecord(credential=self.to_wire(), version=self.version)
        )


def remove_credential_record(key: CredentialKey) -> MetadataRecord:
    """Return the record that takes a credential away."""
    return MetadataRecord(
        remove_scram_credential=records_pb2.RemoveScramCredentialRecord(user=key.user, mechanism=key.mechanism)
    )
