"""Users that one broker knows from a file, for the first administrator (`sasl.users.location`).

What is there is read again when it changes; passwords are not kept, only what SCRAM checks them by. What has been
deleted has no users; what is there and is no good leaves those that there were.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from scramp import ScramException, ScramMechanism

from broker.security.passwords import Stamp, is_there, read_passwords, refusal, stamp_of
from raftlog.errors import InvalidConfig
from raftmeta.credentials import KEY_BYTES, MECHANISM_NAMES, Credential, CredentialKey, Mechanism

logger = logging.getLogger(__name__)

ITERATIONS: Final = 8_192
"""Of PBKDF2, as `raftlog user create` has it."""
SALT_BYTES: Final = 32
"""As `raftlog user create` has them: salts of another length would tell who is in the file."""


class UsersFile:
    """The users in a file or directory; `look` finds out whether it has changed. `find` is for any thread.

    Versions of its credentials are negative, and never come twice. Salts are random, and stay while the password does.
    """

    def __init__(self, path: str, mechanisms: Iterable[str]) -> None:
        """Read it, which has to be there now.

        Raises:
            InvalidConfig: it cannot be read, or is not what it should be; never shows a password.
        """
        self._path: Final = Path(path)
        self._mechanisms: Final = tuple(each for each in KEY_BYTES if MECHANISM_NAMES[each] in mechanisms)
        self._secret: Final = secrets.token_bytes(32)
        self._digests: dict[str, bytes] = {}
        """Of passwords, by user, with a key of this process: whether one has changed."""
        self._credentials: Mapping[CredentialKey, Credential] = {}
        self._versions = 0
        self._refused = ""
        """Why what is there now is no good."""
        self._stamp: Stamp | None = stamp_of(self._path)
        """None: there is nothing."""
        self._take(read_passwords(self._path))

    def find(self, user: str, mechanism: Mechanism) -> Credential | None:
        """Return a user's credential."""
        return self._credentials.get(CredentialKey(user, mechanism))

    def __len__(self) -> int:
        """How many users there are."""
        return len(self._digests)

    def look(self) -> bool:
        """Read it again if it has changed; whether another credential has come of that. Takes a while, in a thread.

        What is no good leaves everything as it was, with a line in the log; nothing at all has no users.
        """
        stamp = stamp_of(self._path) if is_there(self._path) else None
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        if stamp is None:
            self._refused = ""
            logger.warning(
                "sasl.users.location=%r is gone, and so are its users; take the key out of the configuration, "
                "the next start would end there",
                str(self._path),
            )
            return self._take({})
        try:
            changed = self._take(read_passwords(self._path))
        except InvalidConfig as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the users have changed, and those before stay: %s", error)
            return False
        self._refused = ""
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
