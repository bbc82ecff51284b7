"""Users: those in the metadata, and those in the broker's own file, for the first administrator.

A user in the metadata hides a user of the same name in the file. `sasl.users.location` names either a TOML file with a
line `name = "password"` for each user, or a directory, such as a mounted Secret, with a file for each user: the file's
name is the user's, its content without a final newline is the password. Names that begin with a dot are skipped.

The file is read again when it changes. A deleted file has no users; an invalid file keeps the previous users. Memory
holds SCRAM credentials, never passwords, and no message shows a password.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import secrets
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scramp import ScramException, ScramMechanism

from raftlog._core.security.acls import why_no_user
from raftlog.errors import InvalidConfig
from raftmeta.credentials import KEY_BYTES, MECHANISM_NAMES, Credential, CredentialKey, Mechanism
from raftmeta.image import MetadataImage

MAX_USERS: Final = 1_000
MAX_BYTES: Final = 1 << 20
_SHOWN: Final = 100

Stamp = tuple[tuple[str, int, int, int], ...]


def read_passwords(path: Path) -> dict[str, str]:
    """Return the users and their passwords, in the file's order; a directory's sorted by name.

    Raises:
        InvalidConfig: the file or directory cannot be read, or is not valid.
    """
    try:
        found = _of_directory(path) if path.is_dir() else _of_file(path)
    except OSError as error:
        raise refusal(path, f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise refusal(path, "it is not UTF-8 text") from None
    if len(found) > MAX_USERS:
        raise refusal(path, f"{len(found)} users; {MAX_USERS} at most, make others with `raftlog user create`")
    for user, password in found.items():
        why = why_no_user(user)
        if why is not None:
            raise refusal(path, f"{user[:_SHOWN]!r} is not a valid user name: {why}")
        if not password:
            raise refusal(path, f"user {user!r} has no password")
    return found


def _of_file(path: Path) -> dict[str, str]:
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise refusal(path, f"it has more than {MAX_BYTES} bytes")
    try:
        found = tomllib.loads(content.decode())
    except tomllib.TOMLDecodeError as error:
        _, at, where = str(error).rpartition(" (at ")  # the text before it may contain a password
        raise refusal(path, f'it is not TOML{at}{where}; write a line name = "password" for each user') from None
    for user, password in found.items():
        if not isinstance(password, str):
            raise refusal(path, f"{user[:_SHOWN]!r} has no password in quotes; a name with a dot needs quotes, too")
    return found


def _of_directory(path: Path) -> dict[str, str]:
    found = {}
    for each in _files(path):
        with open(each, "rb") as file:
            found[each.name] = file.read(MAX_BYTES).decode().removesuffix("\n").removesuffix("\r")
    return found


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if not each.name.startswith(".") and each.is_file())


def is_there(path: Path) -> bool:
    """Whether the path exists, readable or not; a dangling link does not."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def stamp_of(path: Path) -> Stamp:
    """Return a value that changes with the files; empty if they cannot be read."""
    try:
        found = [(each.name, os.stat(each)) for each in (path, *(_files(path) if path.is_dir() else ()))]
    except OSError:
        return ()
    return tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in found)


def refusal(path: Path, why: str) -> InvalidConfig:
    """Return the error that says what is wrong with the file or directory."""
    return InvalidConfig(f"sasl.users.location={str(path)!r}: {why}")


def administrator(path: Path, super_users: frozenset[str]) -> Mapping[str, str]:
    """Return a client's settings for the first super user in the file, or for its first user without super users.

    Raises:
        InvalidConfig: as `read_passwords`.
    """
    for user, password in read_passwords(path).items():
        if not super_users or f"User:{user}" in super_users:
            return {"sasl.username": user, "sasl.password": password}
    return {}


logger = logging.getLogger(__name__)

ITERATIONS: Final = 8_192
"""PBKDF2's, equal to the default of `raftlog user create`."""
SALT_BYTES: Final = 32
"""Equal to `raftlog user create`'s: a different length would reveal which users are in the file."""


class UsersFile:
    """The users in a file or directory; `look` reads it again if it has changed. `find` is for any thread.

    Versions of its credentials are negative and never repeat. Salts are random, and change only with the password.
    """

    def __init__(self, path: str, mechanisms: Iterable[str]) -> None:
        """Read the file or directory, which has to exist.

        Raises:
            InvalidConfig: it cannot be read, or is not valid; never shows a password.
        """
        self._path: Final = Path(path)
        self._mechanisms: Final = tuple(each for each in KEY_BYTES if MECHANISM_NAMES[each] in mechanisms)
        self._secret: Final = secrets.token_bytes(32)
        self._digests: dict[str, bytes] = {}
        """HMACs of the passwords by user, to detect a change."""
        self._credentials: Mapping[CredentialKey, Credential] = {}
        self._versions = 0
        self._refused = ""
        """Why the present content is not valid; "" if it is."""
        self._stamp: Stamp | None = stamp_of(self._path)
        """None if the file is gone."""
        self._take(read_passwords(self._path))

    def find(self, user: str, mechanism: Mechanism) -> Credential | None:
        """Return a user's credential."""
        return self._credentials.get(CredentialKey(user, mechanism))

    def __len__(self) -> int:
        """Return the number of users."""
        return len(self._digests)

    def look(self) -> bool:
        """Read the file again if it has changed; return whether a credential has changed. Blocks; call it in a thread.

        An invalid file keeps the previous users, is logged once and read again at each look: what cannot be read now
        may be readable later without a change. A deleted file has no users.
        """
        stamp = stamp_of(self._path) if is_there(self._path) else None
        if stamp == self._stamp:
            return False
        if stamp is None:
            self._stamp = stamp
            self._refused = ""
            logger.warning(
                "sasl.users.location=%r was deleted, and so were its users; remove the key from the configuration, or "
                "the next start will fail",
                str(self._path),
            )
            return self._take({})
        try:
            changed = self._take(read_passwords(self._path))
        except InvalidConfig as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the changed users are not valid, the previous ones stay: %s", error)
            return False
        self._stamp, self._refused = stamp, ""
        if changed:
            logger.info("users read again", extra={"event": "users_file_read", "file": str(self._path)})
        return changed

    def _take(self, passwords: Mapping[str, str]) -> bool:
        digests = {user: self._digest(password) for user, password in passwords.items()}
        if digests == self._digests:
            return False
        credentials = {}
        for user, password in passwords.items():
            same = hmac.compare_digest(digests[user], self._digests.get(user, b""))
            for mechanism in self._mechanisms:
                before = self._credentials.get(CredentialKey(user, mechanism))
                made = before if same and before is not None else self._make(user, password, mechanism)
                credentials[made.key] = made
        self._digests, self._credentials = digests, credentials
        return True

    def _make(self, user: str, password: str, mechanism: Mechanism) -> Credential:
        scram = ScramMechanism(MECHANISM_NAMES[mechanism])
        try:
            made = scram.make_auth_info(password, ITERATIONS, secrets.token_bytes(SALT_BYTES))
        except ScramException:
            raise refusal(
                self._path, f"the password of {user!r} has characters that are not allowed (RFC 4013)"
            ) from None
        salt, stored_key, server_key, iterations = made
        self._versions -= 1
        return Credential(user, mechanism, iterations, self._versions, salt, stored_key, server_key)

    def _digest(self, password: str) -> bytes:
        return hmac.digest(self._secret, password.encode(), hashlib.sha256)


assert hashlib.sha256().digest_size == SALT_BYTES, "imitated salts have the length of real ones"
_DRAW_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class _Model:
    """The basis of imitations, derived from the existing credentials."""

    credentials: Mapping[CredentialKey, Credential]
    key: bytes = field(repr=False)
    iterations: Counter[tuple[Mechanism, int]]
    """Number of credentials by mechanism and iterations."""


class Users:
    """Finds credentials, and imitates those of unknown users. `file`: the broker's own file, if configured."""

    def __init__(self, image: Callable[[], MetadataImage]) -> None:
        self._image = image
        self.file: UsersFile | None = None
        self._own_secret: Final = secrets.token_bytes(SALT_BYTES)
        self._known_model: _Model | None = None

    def find(self, user: str, mechanism: Mechanism) -> Credential | None:
        """Return the credential, None if the user is unknown or has none for that mechanism."""
        image = self._image()
        found = image.credential(user, mechanism)
        if found is not None or self.file is None or image.credentials_of(user):
            return found
        return self.file.find(user, mechanism)

    def is_current(self, user: str, mechanism: Mechanism, version: int) -> bool:
        """Whether the user's present credential has that version."""
        found = self.find(user, mechanism)
        return found is not None and found.version == version

    def imitation(self, user: str, mechanism: Mechanism) -> Credential:
        """Return a credential for an unknown user that looks like a real one and that no password matches.

        A client learns only at the end of the whole exchange that its name or its password is wrong, and not which.
        The imitation changes when the cluster's oldest credential changes, and, for some names, when users get other
        numbers of iterations; docs/security.md says what an attacker can learn from that.
        """
        model = self._model()
        iterations = self._iterations(model, user, mechanism)
        salt = hmac.digest(model.key, f"{mechanism} {iterations} {user}".encode(), hashlib.sha256)
        size = KEY_BYTES[mechanism]
        no_key = hashlib.shake_256(b"no password has this" + salt).digest(2 * size)
        return Credential(user, mechanism, iterations, 0, salt, no_key[:size], no_key[size:])

    def _iterations(self, model: _Model, user: str, mechanism: Mechanism) -> int:
        """Return a number of iterations, each as likely as its share of the existing credentials.

        Weighted rendezvous hashing: a new credential moves some names to its number of iterations, and to no other.
        """
        counts = {number: count for (each, number), count in model.iterations.items() if each == mechanism}
        if self.file or not counts:
            counts[ITERATIONS] = counts.get(ITERATIONS, 0) + 1

        def wait(number: int) -> float:
            """Return the first arrival of a Poisson process with rate `counts[number]`; the earliest number wins."""
            drawn = hmac.digest(model.key, f"iterations {mechanism} {number} {user}".encode(), hashlib.sha256)
            share = (int.from_bytes(drawn[:_DRAW_BYTES], "big") + 1) / (1 << 8 * _DRAW_BYTES)
            return -math.log(share) / counts[number]

        return min(counts, key=wait)

    def _model(self) -> _Model:
        """Return the model of the present credentials.

        Its key derives from the cluster's oldest credential, a secret that all brokers share; without any credential
        each broker uses a secret of its own.
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
