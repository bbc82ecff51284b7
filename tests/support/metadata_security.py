"""Commands about users and permissions for tests. `metadata_histories` draws random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raftlog._core.security.acls import Acl, Operation, PatternType, Permission, ResourceType
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftlog.v1.security_pb2 import SCRAM_SHA_512, RoleAlteration, ScramCredential, UserMechanism
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.credentials import KEY_BYTES, Mechanism
from raftmeta.quotas import QuotaEntity
from tests.support.metadata import EPOCH


def credential(
    user: str = "alice",
    mechanism: Mechanism = SCRAM_SHA_512,
    secret: int = 1,
    iterations: int = 8192,
    *,
    salt_bytes: int = 16,
    key_bytes: int | None = None,
) -> ScramCredential:
    """Return a credential; another `secret` is another salt with other keys."""
    length = KEY_BYTES.get(mechanism, 64) if key_bytes is None else key_bytes
    return ScramCredential(
        user=user,
        mechanism=mechanism,
        salt=bytes([secret]) * salt_bytes,
        stored_key=bytes([secret + 64]) * length,
        server_key=bytes([secret + 128]) * length,
        iterations=iterations,
    )


def deletion(user: str = "alice", mechanism: Mechanism = SCRAM_SHA_512) -> UserMechanism:
    """Return what deletes a credential."""
    return UserMechanism(user=user, mechanism=mechanism)


def alter_users(
    upsertions: Sequence[ScramCredential] = (), deletions: Sequence[UserMechanism] = (), epoch: int = EPOCH
) -> MetadataCommand:
    """Set and delete credentials."""
    command = records_pb2.AlterUsersCommand(upsertions=upsertions, deletions=deletions)
    return MetadataCommand(controller_epoch=epoch, alter_users=command)


def acl(
    name: str = "orders",
    operation: Operation = WireAcl.READ,
    principal: str = "User:alice",
    *,
    host: str = "*",
    resource_type: ResourceType = WireAcl.TOPIC,
    pattern_type: PatternType = WireAcl.LITERAL,
    permission: Permission = WireAcl.ALLOW,
) -> Acl:
    """Return a permission; unless told otherwise alice may read the topic from anywhere."""
    return Acl(resource_type, name, pattern_type, principal, host, operation, permission)


def alter_acls(additions: Sequence[Acl] = (), removals: Sequence[Acl] = (), epoch: int = EPOCH) -> MetadataCommand:
    """Add and remove ACLs."""
    command = records_pb2.AlterAclsCommand(
        additions=[each.to_wire() for each in additions], removals=[each.to_wire() for each in removals]
    )
    return MetadataCommand(controller_epoch=epoch, alter_acls=command)


def role(
    name: str = "clerk",
    action: RoleAlteration.Action.ValueType = RoleAlteration.CHANGE,
    *,
    add: Sequence[Acl] = (),
    remove: Sequence[Acl] = (),
    grant: Sequence[str] = (),
    revoke: Sequence[str] = (),
) -> RoleAlteration:
    """Return a change of a role; the permissions become the role's, whosever they are."""
    wires = [[replace(each, principal="").to_wire() for each in acls] for acls in (add, remove)]
    return RoleAlteration(
        name=name, action=action, additions=wires[0], removals=wires[1], grants=grant, revocations=revoke
    )


def alter_roles(*alterations: RoleAlteration, epoch: int = EPOCH) -> MetadataCommand:
    """Change roles."""
    command = records_pb2.AlterRolesCommand(alterations=alterations)
    return MetadataCommand(controller_epoch=epoch, alter_roles=command)


Alteration = tuple[QuotaEntity, str, float | None]


def alter_quotas(*alterations: Alteration, validate_only: bool = False) -> MetadataCommand:
    """Set quotas, and remove those with None."""
    command = records_pb2.AlterQuotasCommand(
        alterations=[
            records_pb2.QuotaRecord(entity=entity.to_wire(), key=key, value=value) for entity, key, value in alterations
        ],
        validate_only=validate_only,
    )
    return MetadataCommand(controller_epoch=EPOCH, alter_quotas=command)
