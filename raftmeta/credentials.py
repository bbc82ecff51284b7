"""Stored credentials (RFC 5802): enough to check a password, not enough to log in. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from raftlog.v1 import records_pb2, security_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512, ScramMechanism

Mechanism: TypeAlias = ScramMechanism.ValueType

KEY_BYTES: Final = {SCRAM_SHA_256: 32, SCRAM_SHA_512: 64}
"""Length of both keys, by known mechanism, in the order of the mechanisms' numbers."""
MECHANISM_NAMES: Final = {SCRAM_SHA_256: "SCRAM-SHA-256", SCRAM_SHA_512: "SCRAM-SHA-512"}
"""As clients name them (RFC 7677)."""


class CredentialKey(NamedTuple):
    """A user has at most one credential of each mechanism."""

    user: str
    mechanism: Mechanism


@dataclass(frozen=True, slots=True)
class Credential:
    """A user's credential. `version`: the metadata offset at which it was set, so another one has another version.

    The keys are never shown: with them an attacker could impersonate the server and try passwords.
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
        """The key in `MetadataImage.credentials`."""
        return CredentialKey(self.user, self.mechanism)

    @classmethod
    def from_wire(cls, wire: security_pb2.ScramCredential, version: int) -> Credential:
        """Return the credential of a message, unchecked."""
        return cls(wire.user, wire.mechanism, wire.iterations, version, wire.salt, wire.stored_key, wire.server_key)

    def to_wire(self) -> security_pb2.ScramCredential:
        """Return the wire form, without the version."""
        return security_pb2.ScramCredential(
            user=self.user,
            mechanism=self.mechanism,
            iterations=self.iterations,
            salt=self.salt,
            stored_key=self.stored_key,
            server_key=self.server_key,
        )

    def to_record(self) -> MetadataRecord:
        """Return the record that sets it, and replaces another one with its key."""
        return MetadataRecord(
            scram_credential=records_pb2.ScramCredentialRecord(credential=self.to_wire(), version=self.version)
        )


def remove_credential_record(key: CredentialKey) -> MetadataRecord:
    """Return the record that removes a credential."""
    return MetadataRecord(
        remove_scram_credential=records_pb2.RemoveScramCredentialRecord(user=key.user, mechanism=key.mechanism)
    )
