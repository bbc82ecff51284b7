"""The asynchronous admin client's part about users and permissions."""

from __future__ import annotations

from collections.abc import Iterable

from raftlog._client.admin import AdminEngine
from raftlog.security import DEFAULT_ITERATIONS, AclBinding, AclFilter, ScramMechanism, UserScramCredential


class SecurityAdmin:
    """As `raftlog._admin_security.SecurityAdmin`, awaitable."""

    _engine: AdminEngine

    async def create_acls(self, bindings: AclBinding | Iterable[AclBinding], *, timeout: float | None = None) -> None:
        """As `raftlog.Admin.create_acls`."""
        await self._engine.create_acls(bindings, timeout)

    async def describe_acls(
        self,
        filter: AclFilter | None = None,
        *,
        timeout: float | None = None,
    ) -> list[AclBinding]:
        """As `raftlog.Admin.describe_acls`."""
        return await self._engine.describe_acls(filter or AclFilter(), timeout)

    async def delete_acls(
        self, filters: AclFilter | Iterable[AclFilter], *, validate_only: bool = False, timeout: float | None = None
    ) -> list[AclBinding]:
        """As `raftlog.Admin.delete_acls`."""
        return await self._engine.delete_acls(filters, validate_only, timeout)

    async def alter_user(
        self,
        name: str,
        password: str,
        mechanism: str | ScramMechanism = ScramMechanism.SCRAM_SHA_512,
        iterations: int = DEFAULT_ITERATIONS,
        *,
        only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """As `raftlog.Admin.alter_user`."""
        await self._engine.alter_user(name, password, mechanism, iterations, only, timeout)

    async def delete_user(
        self, name: str, mechanism: str | ScramMechanism | None = None, *, timeout: float | None = None
    ) -> None:
        """As `raftlog.Admin.delete_user`."""
        await self._engine.delete_user(name, mechanism, timeout)

    async def describe_users(
        self, names: str | Iterable[str] = (), *, timeout: float | None = None
    ) -> list[UserScramCredential]:
        """As `raftlog.Admin.describe_users`."""
        return await self._engine.describe_users(names, timeout)
