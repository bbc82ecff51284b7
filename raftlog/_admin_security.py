"""The synchronous admin client's part about users and permissions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from raftlog._client.admin import AdminEngine
from raftlog.security import DEFAULT_ITERATIONS, AclBinding, AclFilter, ScramMechanism, UserScramCredential

if TYPE_CHECKING:
    from raftlog._client.background import LoopThread


class SecurityAdmin:
    """Users, and who may do what."""

    _engine: AdminEngine
    _thread: LoopThread

    def create_acls(self, bindings: AclBinding | Iterable[AclBinding], *, timeout: float | None = None) -> None:
        """Allow or deny, all of them or none; what is there already stays.

            admin.create_acls(AclBinding("User:ada", AclOperation.READ, ResourceType.TOPIC, "payments"))

        Raises:
            InvalidRequestError: one that cannot be: no `User:NAME`, an operation that such a resource does not have.
            ClusterAuthorizationFailed: this user may not.
            SecurityDisabled: brokers have no authorizer.
            UnsupportedVersion: metadata.version is still too low.
        """
        self._thread.run(self._engine.create_acls(bindings, timeout))

    def describe_acls(self, filter: AclFilter | None = None, *, timeout: float | None = None) -> list[AclBinding]:
        """Return the permissions that are meant; without a filter all.

        Raises:
            ClusterAuthorizationFailed: this user may not.
        """
        return self._thread.run(self._engine.describe_acls(filter or AclFilter(), timeout))

    def delete_acls(
        self, filters: AclFilter | Iterable[AclFilter], *, validate_only: bool = False, timeout: float | None = None
    ) -> list[AclBinding]:
        """Delete what any of the filters means and return it; with `validate_only` return what would go.

        Asked again after an answer that was lost, it returns what was left to delete then.

        Raises:
            ClusterAuthorizationFailed: this user may not.
        """
        return self._thread.run(self._engine.delete_acls(filters, validate_only, timeout))

    def alter_user(
        self,
        name: str,
        password: str,
        mechanism: str | ScramMechanism = ScramMechanism.SCRAM_SHA_512,
        iterations: int = DEFAULT_ITERATIONS,
        *,
        only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Create a user, or give one another password; who is logged in as it has to log in again.

        The password does not leave this process, only what brokers check one with. Credentials of other mechanisms
        stay, unless `only` is true.

        >>> from raftlog import Admin
        >>> with Admin(cluster.bootstrap) as admin:
        ...     admin.alter_user("ada", "difference-engine")
        ...     admin.describe_users()
        ...     admin.delete_user("ada")
        [UserScramCredential(user='ada', mechanism=<ScramMechanism.SCRAM_SHA_512: 2>, iterations=8192)]

        Raises:
            UnacceptableCredential: the name, the password or the number of iterations is not allowed.
            ClusterAuthorizationFailed: this user may not.
            UnsupportedVersion: metadata.version is still too low.
        """
        self._thread.run(self._engine.alter_user(name, password, mechanism, iterations, only, timeout))

    def delete_user(
        self, name: str, mechanism: str | ScramMechanism | None = None, *, timeout: float | None = None
    ) -> None:
        """Delete a user, or its credential of one mechanism. Who is logged in with it is put out at once.

        Raises:
            ResourceNotFound: there is no such user.
            ClusterAuthorizationFailed: this user may not.
        """
        self._thread.run(self._engine.delete_user(name, mechanism, timeout))

    def describe_users(
        self, names: str | Iterable[str] = (), *, timeout: float | None = None
    ) -> list[UserScramCredential]:
        """Return who can log in, and how: those that are named, or all.

        Names that nobody has are left out, and so are users in a broker's `sasl.users.location`: only that one knows
        them.

        Raises:
            ClusterAuthorizationFailed: this user may not.
        """
        return self._thread.run(self._engine.describe_users(names, timeout))
