"""Decisions on users, permissions, roles and quotas (KIP-554, KIP-140, KIP-290, KIP-546)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from raftlog._core.security.acls import (
    ROLE_PREFIX,
    Acl,
    Role,
    check_acl,
    check_permission,
    check_principal,
    check_role_name,
    field_order,
    is_network,
    why_no_user,
)
from raftlog.errors import DuplicateResource, InvalidRequestError, ResourceNotFound, UnacceptableCredential
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftlog.v1.security_pb2 import UNKNOWN_MECHANISM, RoleAlteration, ScramCredential, UserMechanism
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.credentials import KEY_BYTES, MECHANISM_NAMES, Credential, CredentialKey, remove_credential_record
from raftmeta.decide.outcome import Accepted, CommandResult, shown
from raftmeta.features import (
    ACLS_OF_NETWORKS,
    ACLS_OF_NETWORKS_LEVEL,
    QUOTAS,
    QUOTAS_LEVEL,
    ROLES,
    ROLES_LEVEL,
    SECURITY,
    SECURITY_LEVEL,
    check_metadata_version,
)
from raftmeta.image import MetadataImage
from raftmeta.quotas import QuotaEntity, check_quota, quota_record
from raftmeta.replay import replay_all

MAX_CREDENTIALS: Final = 10_000
"""In a cluster; every controller and broker holds all of them."""
MAX_ACLS: Final = 10_000
"""In a cluster, as with the credentials; permissions of roles count, too."""
MAX_ROLES: Final = 1_000
MAX_GRANTS: Final = 10_000
"""Of roles to principals, in a cluster."""
MAX_ROLES_OF_PRINCIPAL: Final = 32
"""A decision looks at each of them."""
MAX_QUOTAS: Final = 10_000
"""In a cluster, counted by entity and key."""
MAX_SECURITY_CHANGES: Final = 1_000
"""In one command: credentials set and deleted, ACLs added and removed, quotas altered, or parts of roles changed."""
MIN_SALT_BYTES: Final = 12
MAX_SALT_BYTES: Final = 255
MIN_ITERATIONS: Final = 4_096
"""RFC 7677, section 4."""
MAX_ITERATIONS: Final = 1_000_000
"""More of them keep each client busy for seconds, without making a good password better."""
assert min(MAX_CREDENTIALS, MAX_ACLS, MAX_QUOTAS) >= MAX_SECURITY_CHANGES


def alter_users(image: MetadataImage, command: records_pb2.AlterUsersCommand, offset: int) -> Accepted:
    """Set and delete credentials, all or none. A deletion without a mechanism deletes all credentials of the user.

    A credential that is set to its present value keeps its version.

    Raises:
        UnacceptableCredential: a user's name, a salt, a key or a number of iterations is not allowed.
        ResourceNotFound: one that is to be deleted is not there.
        InvalidRequestError: too many, in the command or in the cluster, or one is named twice.
    """
    check_metadata_version(image, SECURITY_LEVEL, SECURITY)
    _check_changes(len(command.upsertions) + len(command.deletions), "credentials")
    named: set[CredentialKey] = set()
    records = []
    for deletion in command.deletions:
        for key in _present(image, deletion):
            _check_once(key, named)
            records.append(remove_credential_record(key))
    credentials = len(image.credentials) - len(records)
    for wire in command.upsertions:
        check_credential(wire)
        credential = Credential.from_wire(wire, offset)
        _check_once(credential.key, named)
        known = image.credentials.get(credential.key)
        if known is None:
            credentials += 1
        elif known.to_wire() == wire:
            continue
        records.append(credential.to_record())
    if credentials > MAX_CREDENTIALS and credentials > len(image.credentials):
        raise InvalidRequestError(
            f"the cluster would have {credentials} credentials, at most {MAX_CREDENTIALS} are allowed; delete users "
            "that are not needed (raftlog user delete)"
        )
    return _accepted(image, records, offset)


def alter_acls(image: MetadataImage, command: records_pb2.AlterAclsCommand, offset: int) -> Accepted:
    """Add and remove ACLs, all or none. Adding an existing ACL, or removing a missing one, changes nothing.

    Raises:
        UnsupportedVersion: the cluster's metadata.version has no ACLs, or none for networks.
        InvalidRequestError: one says what no ACL can say, is both added and removed, or they are too many, in the
            command or in the cluster.
    """
    check_metadata_version(image, SECURITY_LEVEL, SECURITY)
    _check_changes(len(command.additions) + len(command.removals), "ACLs")
    for wire in (
        *command.additions,
        *command.removals,
    ):  # before `canonical`, which older controllers do not apply to it
        if is_network(wire.host):
            check_metadata_version(image, ACLS_OF_NETWORKS_LEVEL, ACLS_OF_NETWORKS)
    removals = dict.fromkeys(Acl.from_wire(wire).canonical() for wire in command.removals)
    additions = dict.fromkeys(Acl.from_wire(wire).canonical() for wire in command.additions)
    for acl in removals:
        if acl not in image.acls:
            check_acl(acl)
    for acl in additions:
        check_acl(acl)
        if acl in removals:
            raise InvalidRequestError(f"one ACL is both added and removed in one request: {acl}")
    removed = [acl.to_removal() for acl in removals if acl in image.acls]
    added = [acl.to_record() for acl in additions if acl not in image.acls]
    acls = len(image.acls) - len(removed) + len(added) + _permissions(image.roles)
    if added and acls > MAX_ACLS:
        raise InvalidRequestError(
            f"the cluster would have {acls} ACLs, at most {MAX_ACLS} are allowed; use prefixed ones "
            "(--resource-pattern-type prefixed), or remove those that are not needed (raftlog acl remove)"
        )
    return _accepted(image, [*removed, *added], offset)


def alter_roles(image: MetadataImage, command: records_pb2.AlterRolesCommand, offset: int) -> Accepted:
    """Create, change and delete roles, all or none. Adding what exists, or removing what is missing, changes nothing.

    Raises:
        UnsupportedVersion: the cluster's metadata.version has no roles.
        ResourceNotFound, DuplicateResource: there is no such role to change or delete, or one already.
        InvalidRequestError: a name, a permission or a principal is not allowed, a role is named twice, or they are too
            many, in the command or in the cluster.
    """
    check_metadata_version(image, ROLES_LEVEL, ROLES)
    _check_changes(sum(map(parts_of_role, command.alterations)), "roles, permissions of roles and grants")
    named = set[str]()
    records = []
    for wire in command.alterations:
        if wire.name in named:
            raise InvalidRequestError(f"role {shown(wire.name)} is named twice in one request")
        named.add(wire.name)
        record = _role_record(image, wire)
        if record is not None:
            records.append(record)
    roles = replay_all(image, records, offset).roles
    _check_room(image, roles, {principal for record in records for principal in record.role.grants})
    return _accepted(image, records, offset)


def parts_of_role(wire: RoleAlteration) -> int:
    """Return the number of changes in an alteration."""
    return 1 + len(wire.additions) + len(wire.removals) + len(wire.grants) + len(wire.revocations)


def _role_record(image: MetadataImage, wire: RoleAlteration) -> MetadataRecord | None:
    """Return the record of one alteration; None if it changes nothing."""
    role = image.roles.get(wire.name)
    is_new = wire.action == RoleAlteration.CREATE
    if is_new:
        check_role_name(wire.name)
        if role is not None:
            raise DuplicateResource(f"there is a role {shown(wire.name)} already; raftlog role describe shows it")
        role = Role(wire.name)
    elif role is None:
        raise ResourceNotFound(f"there is no role {shown(wire.name)}; raftlog role list names those there are")
    if wire.action == RoleAlteration.DELETE:
        if wire.additions or wire.removals or wire.grants or wire.revocations:
            raise InvalidRequestError(f"role {shown(wire.name)} is both deleted and changed in one request")
        return MetadataRecord(remove_role=records_pb2.RemoveRoleRecord(name=wire.name))
    if wire.action not in (RoleAlteration.CREATE, RoleAlteration.CHANGE):
        raise InvalidRequestError(f"action {wire.action} on role {shown(wire.name)} is not known here")
    additions, removals = _of_role(role, wire.additions), _of_role(role, wire.removals)
    for acl in additions | removals:
        if acl not in role.permissions:  # what is there can be removed, whatever this version thinks of it
            check_permission(acl)
    for principal in (*wire.grants, *wire.revocations):
        if principal not in role.principals:
            check_principal(principal)
    if additions & removals or set(wire.grants).intersection(wire.revocations):
        raise InvalidRequestError(f"role {shown(wire.name)}: one request both adds and removes the same")
    additions, removals = additions - role.permissions, removals & role.permissions
    grants, revocations = set(wire.grants) - role.principals, role.principals.intersection(wire.revocations)
    if not (is_new or additions or removals or grants or revocations):
        return None
    record = records_pb2.RoleRecord(
        name=role.name,
        additions=[acl.to_wire() for acl in sorted(additions, key=field_order)],
        removals=[acl.to_wire() for acl in sorted(removals, key=field_order)],
        grants=sorted(grants),
        revocations=sorted(revocations),
    )
    return MetadataRecord(role=record)


def _of_role(role: Role, wires: Iterable[WireAcl]) -> frozenset[Acl]:
    """Return permissions as the role has them.

    Raises:
        InvalidRequestError: one is of another principal.
    """
    found = []
    for wire in wires:
        if wire.principal not in ("", role.principal):
            raise InvalidRequestError(
                f"the principal of a permission of role {shown(role.name)} is {ROLE_PREFIX} and its name, or empty, "
                f"not {shown(wire.principal)}; principals get a role by a grant"
            )
        found.append(replace(Acl.from_wire(wire), principal=role.principal).canonical())
    return frozenset(found)


def _check_room(image: MetadataImage, roles: Mapping[str, Role], granted: set[str]) -> None:
    """Check that the cluster may have these roles; a change that raises no count is allowed, even over a limit."""
    counts: tuple[tuple[str, int, int, int], ...] = (
        ("roles", len(image.roles), len(roles), MAX_ROLES),
        (
            "ACLs and permissions of roles",
            len(image.acls) + _permissions(image.roles),
            len(image.acls) + _permissions(roles),
            MAX_ACLS,
        ),
        ("grants of roles", _grants(image.roles), _grants(roles), MAX_GRANTS),
    )
    for what, before, after, most in counts:
        if after > most and after > before:
            raise InvalidRequestError(f"the cluster would have {after} {what}, at most {most} are allowed")
    if not granted:
        return
    held = Counter(principal for role in roles.values() for principal in role.principals if principal in granted)
    for principal, count in sorted(held.items()):
        if count > MAX_ROLES_OF_PRINCIPAL:
            raise InvalidRequestError(
                f"{shown(principal)} would have {count} roles, at most {MAX_ROLES_OF_PRINCIPAL} are allowed"
            )


def _permissions(roles: Mapping[str, Role]) -> int:
    return sum(len(role.permissions) for role in roles.values())


def _grants(roles: Mapping[str, Role]) -> int:
    return sum(len(role.principals) for role in roles.values())


def alter_quotas(image: MetadataImage, command: records_pb2.AlterQuotasCommand, offset: int) -> Accepted:
    """Set and remove quotas, all or none. Setting the present value, or removing a missing quota, changes nothing.

    Raises:
        InvalidRequestError: an entity, a key or a value is not allowed, an entity and key is named twice, or there are
            too many, in the command or in the cluster.
    """
    check_metadata_version(image, QUOTAS_LEVEL, QUOTAS)
    _check_changes(len(command.alterations), "quotas")
    named: set[tuple[QuotaEntity, str]] = set()
    records = []
    quotas = sum(map(len, image.quotas.values()))
    added = 0
    for wire in command.alterations:
        entity, value = QuotaEntity.from_wire(wire.entity).canonical(), wire.value if wire.HasField("value") else None
        known = image.quotas.get(entity, {}).get(wire.key)
        if value is not None or known is None:  # what is there can be removed, whatever this version thinks of it
            check_quota(entity, wire.key, value)
        if (entity, wire.key) in named:
            raise InvalidRequestError(f"{wire.key} of {entity} is named twice in one request")
        named.add((entity, wire.key))
        if value != known:
            records.append(quota_record(entity, wire.key, value))
            added += (known is None) - (value is None)
    if added > 0 and quotas + added > MAX_QUOTAS:
        raise InvalidRequestError(
            f"the cluster would have {quotas + added} quotas, at most {MAX_QUOTAS} are allowed; use defaults "
            "(raftlog quota set --user-defaults, --client-defaults or --ip-defaults), or remove some"
        )
    if command.validate_only:
        return (), CommandResult(image.offset)
    return _accepted(image, records, offset)


def check_credential(wire: ScramCredential) -> None:
    """Check that a credential is valid; errors show nothing of it but the user's name.

    Raises:
        UnacceptableCredential: it is not.
    """
    why = why_no_user(wire.user)
    if why is not None:
        raise UnacceptableCredential(f"{shown(wire.user)} cannot be the name of a user: {why}")
    user = f"user {shown(wire.user)}"
    if wire.mechanism not in KEY_BYTES:
        raise UnacceptableCredential(
            f"{user}: mechanism {wire.mechanism} is not known here, but {' and '.join(MECHANISM_NAMES.values())} are"
        )
    if not MIN_SALT_BYTES <= len(wire.salt) <= MAX_SALT_BYTES:
        raise UnacceptableCredential(
            f"{user}: the salt has {len(wire.salt)} bytes, it may have {MIN_SALT_BYTES} to {MAX_SALT_BYTES}"
        )
    for what, key in (("stored", wire.stored_key), ("server", wire.server_key)):
        if len(key) != KEY_BYTES[wire.mechanism]:
            raise UnacceptableCredential(
                f"{user}: the {what} key has {len(key)} bytes, with {MECHANISM_NAMES[wire.mechanism]} it has "
                f"{KEY_BYTES[wire.mechanism]}"
            )
    if not MIN_ITERATIONS <= wire.iterations <= MAX_ITERATIONS:
        raise UnacceptableCredential(
            f"{user}: {wire.iterations} iterations, there may be {MIN_ITERATIONS} to {MAX_ITERATIONS}"
        )


def _present(image: MetadataImage, deletion: UserMechanism) -> list[CredentialKey]:
    """Return the credentials that a deletion deletes, at least one.

    Raises:
        ResourceNotFound: there is none.
    """
    if deletion.mechanism == UNKNOWN_MECHANISM:
        found = [credential.key for credential in image.credentials_of(deletion.user)]
        if not found:
            raise ResourceNotFound(f"there is no user {shown(deletion.user)}; raftlog user list names them")
        return found
    key = CredentialKey(deletion.user, deletion.mechanism)
    if key not in image.credentials:
        mechanism = MECHANISM_NAMES.get(deletion.mechanism, f"mechanism {deletion.mechanism}")
        raise ResourceNotFound(
            f"user {shown(deletion.user)} has no credential for {mechanism}; raftlog user list names those there are"
        )
    return [key]


def _check_once(key: CredentialKey, named: set[CredentialKey]) -> None:
    if key in named:
        raise InvalidRequestError(
            f"user {shown(key.user)}: {MECHANISM_NAMES[key.mechanism]} is named twice in one request"
        )
    named.add(key)


def _check_changes(count: int, what: str) -> None:
    if count > MAX_SECURITY_CHANGES:
        raise InvalidRequestError(
            f"the request changes {count} {what}, at most {MAX_SECURITY_CHANGES} can be changed at once; split it"
        )


def _accepted(image: MetadataImage, records: list[MetadataRecord], offset: int) -> Accepted:
    return tuple(records), CommandResult(offset if records else image.offset)
