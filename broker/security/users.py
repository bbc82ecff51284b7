"""Who may authenticate: the users in the metadata, and those of the broker's own file whose names are not there."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from broker.security.users_file import ITERATIONS, SALT_BYTES, UsersFile
from raftmeta.credentials import KEY_BYTES, Credential, CredentialKey, Mechanism
from raftmeta.image import MetadataImage

assert hashlib.sha256().digest_size == SALT_BYTES, "an imitated salt is as long as others"
_DRAW_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class _Model:
    """What imitations are made by, of the credentials that there are."""

    credentials: Mapping[CredentialKey, Credential]
    key: bytes = field(repr=False)
    iterations: Counter[tuple[Mechanism, int]]
    """How many credentials of a mechanism have so many."""


class Users:
    """Finds credentials, and imitates those that there are not. `file` is set where there is one."""

    def __init__(self, image: Callable[[], MetadataImage]) -> None:
        self._image = image
        self.file: UsersFile | None = None
        self._own_secret: Final = secrets.token_bytes(SALT_BYTES)
        self._known_model: _Model | None = None

    def find(self, user: str, mechanism: Mechanism) -> Credential | None:
        """Return what a password is checked by, None where there is no such user, or none with that mechanism."""
        image = self._image()
        found = image.credential(user, mechanism)
        if found is not None or self.file is None or image.credentials_of(user):
            return found
        return self.file.find(user, mechanism)

    def is_current(self, user: str, mechanism: Mechanism, version: int) -> bool:
        """Whether a credential of that version is what counts now."""
        found = self.find(user, mechanism)
        return found is not None and found.version == version

    def imitation(self, user: str, mechanism: Mechanism) -> Credential:
        """Return the credential of a user that there is not: it looks like one from outside, and no password fits.

        So it takes the whole exchange until somebody hears that a name or a password is wrong, and not which of them.
        It changes, as with another password, when the cluster's oldest credential does, and with some names when users
        get other numbers of iterations: docs/security.md says what can be learnt of that.
        """
        model = self._model()
        iterations = self._iterations(model, user, mechanism)
        salt = hmac.digest(model.key, f"{mechanism} {iterations} {user}".encode(), hashlib.sha256)
        size = KEY_BYTES[mechanism]
        no_key = hashlib.shake_256(b"no password has this" + salt).digest(2 * size)
        return Credential(user, mechanism, iterations, 0, salt, no_key[:size], no_key[size:])

    def _iterations(self, model: _Model, user: str, mechanism: Mechanism) -> int:
        """Return a number that credentials have, in proportion to how many have it.

        By weighted rendezvous hashing: where another credential comes, names go over to its number, and to no other.
        """
        counts = {number: count for (each, number), count in model.iterations.items() if each == mechanism}
        if self.file or not counts:
            counts[ITERATIONS] = counts.get(ITERATIONS, 0) + 1

        def wait(number: int) -> float:
            """How long its first arrival takes, were `counts[number]` its rate: the first of all is drawn."""
            drawn = hmac.digest(model.key, f"iterations {mechanism} {number} {user}".encode(), hashlib.sha256)
            share = (int.from_bytes(drawn[:_DRAW_BYTES], "big") + 1) / (1 << 8 * _DRAW_BYTES)
            return -math.log(share) / counts[number]

        return min(counts, key=wait)

    def _model(self) -> _Model:
        """Return the model of the credentials that there are now. Its key is a secret that all brokers have.

        It comes of the cluster's oldest credential. Without one there is no such secret, and each broker has its own.
        """
        image, model = self._image(), self._known_model
        if model is None or model.credentials is not image.credentials:
            credentials = image.credentials.values()
            oldest = min(credentials, key=lambda each: (each.version, each.key), default=None)
            secret = self._own_secret if oldest is None else oldest.server_key
            key = hashlib.sha256(b"raftlog salts" + image.cluster_id.encode() + secret).digest()
            numbers = Counter((each.mechanism, each.iterations) for each in credentials)
            model = self._known_model = _Model(image.credentials, key, numbers)
        return model
