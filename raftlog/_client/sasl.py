"""As whom a client logs in. Imports nothing of gRPC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from raftlog.errors import InvalidConfig

PROTOCOL: Final = "sasl_ssl"
_MECHANISM: Final = "sasl.mechanism"
_USERNAME, _PASSWORD, _LOCATION = "sasl.username", "sasl.password", "sasl.password.location"


@dataclass(frozen=True, slots=True)
class Sasl:
    """A user, and its password or the file that has it. Comparable and picklable; its text is without the password."""

    mechanism: str
    username: str
    password: str = field(default="", repr=False)
    location: str = ""
    """The file with the password, read with every login."""

    def read_password(self) -> str:
        """Return the password as it is now; a line end at the end of the file is none of it.

        Raises:
            InvalidConfig: the file cannot be read, or is empty.
        """
        if not self.location:
            return self.password
        try:
            with open(self.location, encoding="utf-8") as file:
                password = file.read().removesuffix("\n").removesuffix("\r")
        except OSError as error:
            raise InvalidConfig(f"{_LOCATION}={self.location!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidConfig(f"{_LOCATION}={self.location!r} is no text in UTF-8") from None
        if not password:
            raise InvalidConfig(f"{_LOCATION}={self.location!r} is empty; put the password into it")
        return password

    @property
    def settings(self) -> str:
        """Which settings a login comes from: brokers do not say which of them is wrong."""
        password = f"{_LOCATION}={self.location!r}" if self.location else _PASSWORD
        return f"{_USERNAME}, {password} and {_MECHANISM}"


def take_sasl(values: dict[str, Any], protocol: str) -> Sasl | None:
    """Take the values for a login out and return what they say; None: without one.

    Raises:
        InvalidConfig: a login without a protocol that has it, the other way round, or two passwords.
    """
    mechanism = values.pop(_MECHANISM.replace(".", "_"))
    username, password, location = (values.pop(name.replace(".", "_")) for name in (_USERNAME, _PASSWORD, _LOCATION))
    if protocol != PROTOCOL:
        for name, value in ((_USERNAME, username), (_PASSWORD, password), (_LOCATION, location)):
            if value:
                raise InvalidConfig(f"{name} without security.protocol={PROTOCOL}: nobody would log in; set both")
        return None
    if not username:
        raise InvalidConfig(f"security.protocol={PROTOCOL} without {_USERNAME}; say who logs in")
    if password and location:
        raise InvalidConfig(f"{_PASSWORD} and {_LOCATION} are both set; leave one of them out")
    if not password and not location:
        raise InvalidConfig(
            f"security.protocol={PROTOCOL} without a password for user {username!r}; set {_LOCATION}, or {_PASSWORD}"
        )
    return Sasl(mechanism, username, password, location)
