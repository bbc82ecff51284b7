"""ACLs, users and quotas: what kafka-acls.sh and kafka-configs.sh ask, as requests of the gRPC services.

The services hold every rule, write the audit log and propose the same commands as `raftlog acl`, `raftlog user` and
`raftlog quota`. Enums have Kafka's numbers already. Kafka calls the one resource of type CLUSTER `kafka-cluster`,
raftlog `raftlog-cluster`; each is told its own name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.apis import Apis, Handler, each_of, failed
from broker.kafka.codec import Fields
from broker.net.services.admin import AdminService
from broker.net.services.security import SecurityService
from broker.security.caller import Caller
from broker.security.scram import keys_of
from broker.turns import QUICK_AT_A_TIME, in_turns
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import InvalidRequestError, RaftlogError, ResourceNotFound, UnacceptableCredential
from raftlog.v1 import admin_pb2, security_pb2
from raftlog.v1.records_pb2 import QuotaEntity
from raftlog.v1.security_pb2 import Acl
from raftmeta import quotas as meta_quotas
from raftmeta.credentials import KEY_BYTES
from raftmeta.decide.security import MAX_SECURITY_CHANGES

KAFKA_CLUSTER_NAME: Final = "kafka-cluster"


class SecurityApis:
    """The handlers of one broker, by API key."""

    def __init__(self, apis: Apis, service: SecurityService, admin: AdminService) -> None:
        self._apis = apis
        self._service = service
        self._admin = admin
        self.handlers: dict[int, Handler] = {
            api.DESCRIBE_ACLS: self._describe_acls,
            api.CREATE_ACLS: self._create_acls,
            api.DELETE_ACLS: self._delete_acls,
            api.DESCRIBE_CLIENT_QUOTAS: self._describe_quotas,
            api.ALTER_CLIENT_QUOTAS: self._alter_quotas,
            api.DESCRIBE_USER_SCRAM_CREDENTIALS: self._describe_users,
            api.ALTER_USER_SCRAM_CREDENTIALS: self._alter_users,
        }

    # ACLs

    async def _describe_acls(self, request: Fields, version: int, who: Caller) -> Fields:
        call = security_pb2.DescribeAclsRequest(filter=_filter(request))
        try:
            answer = await self._apis.call("Security/DescribeAcls", self._service.DescribeAcls, call, who)
        except RaftlogError as error:
            return {**failed(error), "resources": []}
        by_resource: dict[tuple[int, str, int], list[Fields]] = {}
        async for acl in in_turns(answer.acls, QUICK_AT_A_TIME):
            by_resource.setdefault((acl.resource_type, _kafkas_name(acl), acl.pattern_type), []).append(_entry(acl))
        return {
            "resources": [
                {"resource_type": kind, "resource_name": name, "pattern_type": pattern, "acls": acls}
                for (kind, name, pattern), acls in by_resource.items()
            ]
        }

    async def _create_acls(self, request: Fields, version: int, who: Caller) -> Fields:
        """Create each ACL by itself, as Kafka does: one that is not valid leaves the others."""
        _check_count(request["creations"], "ACLs")

        async def create(wanted: Fields) -> Fields:
            acl = Acl(
                resource_type=wanted["resource_type"],
                resource_name=_own_name(wanted["resource_type"], wanted["resource_name"]),
                pattern_type=wanted["resource_pattern_type"],
                principal=wanted["principal"],
                host=wanted["host"],
                operation=wanted["operation"],
                permission=wanted["permission_type"],
            )
            call = security_pb2.CreateAclsRequest(acls=[acl])
            await self._apis.call("Security/CreateAcls", self._service.CreateAcls, call, who)
            return {"error_message": None}

        return {"results": await each_of(request["creations"], create)}

    async def _delete_acls(self, request: Fields, version: int, who: Caller) -> Fields:
        _check_count(request["filters"], "filters")

        async def delete(wanted: Fields) -> Fields:
            call = security_pb2.DeleteAclsRequest(filters=[_filter(wanted)])
            answer = await self._apis.call("Security/DeleteAcls", self._service.DeleteAcls, call, who)
            return {"matching_acls": [_whole(acl) for acl in answer.deleted]}

        return {"filter_results": await each_of(request["filters"], delete, lambda _: {"matching_acls": []})}

    # Users

    async def _describe_users(self, request: Fields, version: int, who: Caller) -> Fields:
        names = [each["name"] for each in request["users"] or ()]
        try:
            call = security_pb2.DescribeUsersRequest(users=names)
            answer = await self._apis.call("Security/DescribeUsers", self._service.DescribeUsers, call, who)
        except RaftlogError as error:
            return {**failed(error), "results": []}
        by_user: dict[str, list[Fields]] = {}
        for each in answer.users:
            by_user.setdefault(each.user, []).append({"mechanism": each.mechanism, "iterations": each.iterations})
        results: list[Fields] = []
        async for name in in_turns(dict.fromkeys(names or by_user)):
            result: Fields = {"user": name, "credential_infos": by_user.get(name, [])}
            if name not in by_user:
                result |= failed(ResourceNotFound(f"there is no user {name[:255]!r}"))
            results.append(result)
        return {"results": results}

    async def _alter_users(self, request: Fields, version: int, who: Caller) -> Fields:
        """Change each user by itself, as Kafka does: all that the request says of it, or nothing."""
        _check_count([*request["upsertions"], *request["deletions"]], "credentials")
        by_user: dict[str, security_pb2.AlterUsersRequest] = {}
        refused: dict[str, RaftlogError] = {}
        """What is wrong with a user's credential, told only to a caller that may change users."""
        for each in request["upsertions"]:
            call = by_user.setdefault(each["name"], security_pb2.AlterUsersRequest())
            try:
                call.upsertions.append(_credential(each))
            except RaftlogError as error:
                refused[each["name"]] = error
        for each in request["deletions"]:
            call = by_user.setdefault(each["name"], security_pb2.AlterUsersRequest())
            call.deletions.add(user=each["name"], mechanism=each["mechanism"])

        async def alter(user: str) -> Fields:
            if user in refused:
                self._apis.permit("Security/AlterUsers", by_user[user], who)
                raise refused[user]
            await self._apis.call("Security/AlterUsers", self._service.AlterUsers, by_user[user], who)
            return {"error_message": None}

        return {"results": await each_of(by_user, alter, lambda user: {"user": user})}

    # Quotas

    async def _describe_quotas(self, request: Fields, version: int, who: Caller) -> Fields:
        """Return the quotas that the filter selects (KIP-546)."""
        try:
            self._apis.permit("Admin/DescribeClientQuotas", request, who)
            wanted = {field_of(each["entity_type"]): each for each in request["components"]}
            call = admin_pb2.DescribeClientQuotasRequest()
            for field, each in wanted.items():
                if each["match_type"] != MATCH_ANY:
                    setattr(
                        call.filter, field, _quota_name(each["match"], is_default=each["match_type"] == MATCH_DEFAULT)
                    )
            method = self._admin.DescribeClientQuotas
            answer = await self._apis.call("Admin/DescribeClientQuotas", method, call, who)
        except RaftlogError as error:
            return {**failed(error), "entries": None}
        entries: dict[bytes, Fields] = {}
        async for quota in in_turns(answer.quotas):
            names = meta_quotas.QuotaEntity.from_wire(quota.entity)._asdict()
            entity = {field: name for field, name in names.items() if name is not None}
            if not wanted.keys() <= entity.keys() or (request["strict"] and wanted.keys() != entity.keys()):
                continue
            key = quota.entity.SerializeToString(deterministic=True)
            named = [{"entity_type": _ENTITIES[field], "entity_name": name or None} for field, name in entity.items()]
            entry = entries.setdefault(key, {"entity": named, "values": []})
            entry["values"].append({"key": quota.key, "value": quota.value})
        return {"entries": list(entries.values())}

    async def _alter_quotas(self, request: Fields, version: int, who: Caller) -> Fields:
        """Change each entity by itself, as Kafka does."""
        _check_count([op for each in request["entries"] for op in each["ops"]], "quotas")

        async def alter(entry: Fields) -> Fields:
            self._apis.permit("Admin/AlterClientQuotas", entry, who)
            entity = QuotaEntity()
            async for each in in_turns(entry["entity"]):
                setattr(entity, field_of(each["entity_type"]), _quota_name(each["entity_name"], is_default=None))
            call = admin_pb2.AlterClientQuotasRequest(validate_only=request["validate_only"])
            for op in entry["ops"]:
                call.alterations.add(entity=entity, key=op["key"], value=None if op["remove"] else op["value"])
            await self._apis.call("Admin/AlterClientQuotas", self._admin.AlterClientQuotas, call, who)
            return {"error_message": None}

        return {"entries": await each_of(request["entries"], alter, lambda each: {"entity": each["entity"]})}


MATCH_DEFAULT, MATCH_ANY = 1, 2
"""How a filter matches an entity, besides by its name."""
_ENTITIES: Final = {"user": "user", "client_id": "client-id", "ip": "ip"}
"""Kafka's names of what a quota may be of, by the fields of `QuotaEntity`."""


def field_of(entity_type: str) -> str:
    """Return the field of `QuotaEntity` for Kafka's name. Raises InvalidRequestError: there is none."""
    for field, name in _ENTITIES.items():
        if name == entity_type:
            return field
    known = ", ".join(_ENTITIES.values())
    raise InvalidRequestError(f"quotas are of {known}, not of {entity_type[:100]!r}")


def _quota_name(name: str | None, *, is_default: bool | None) -> str:
    """Return a name as `QuotaEntity` has it: empty for the default, which Kafka writes as null.

    Raises:
        InvalidRequestError: a name that would stand for the default, or none where one is needed.
    """
    if is_default or (is_default is None and name is None):
        return ""
    if not name:
        raise InvalidRequestError("the entity of a quota has an empty name; the default is null")
    return name


def _check_count(parts: Iterable[Any], what: str) -> None:
    """Check the length of a list. Raises InvalidRequestError, which closes the connection."""
    count = len(list(parts))
    if count > MAX_SECURITY_CHANGES:
        raise InvalidRequestError(f"{count} {what} in one request, at most {MAX_SECURITY_CHANGES} are taken: split it")


def _filter(wanted: Fields) -> Acl:
    return Acl(
        resource_type=wanted["resource_type_filter"],
        resource_name=_own_name(wanted["resource_type_filter"], wanted["resource_name_filter"] or ""),
        pattern_type=wanted["pattern_type_filter"],
        principal=wanted["principal_filter"] or "",
        host=wanted["host_filter"] or "",
        operation=wanted["operation"],
        permission=wanted["permission_type"],
    )


def _own_name(resource_type: int, name: str) -> str:
    return CLUSTER_NAME if resource_type == Acl.CLUSTER and name == KAFKA_CLUSTER_NAME else name


def _kafkas_name(acl: Acl) -> str:
    return KAFKA_CLUSTER_NAME if acl.resource_type == Acl.CLUSTER else acl.resource_name


def _entry(acl: Acl) -> Fields:
    return {
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl.operation,
        "permission_type": acl.permission,
    }


def _whole(acl: Acl) -> Fields:
    return {
        "error_code": errors.NONE,
        "error_message": None,
        "resource_type": acl.resource_type,
        "resource_name": _kafkas_name(acl),
        "pattern_type": acl.pattern_type,
        **_entry(acl),
    }


def _credential(wanted: Fields) -> security_pb2.ScramCredential:
    """Return the credential of a password that was salted by the client.

    Raises:
        UnacceptableCredential: it has another length than the mechanism's, or the mechanism is not known.
    """
    mechanism, salted = wanted["mechanism"], wanted["salted_password"]
    size = KEY_BYTES.get(mechanism)
    if size is None or len(salted) != size:
        raise UnacceptableCredential(
            f"mechanism {mechanism} with a salted password of {len(salted)} bytes: SCRAM-SHA-256 is mechanism 1, with "
            "32 bytes, SCRAM-SHA-512 is 2, with 64"
        )
    stored_key, server_key = keys_of(salted, mechanism)
    return security_pb2.ScramCredential(
        user=wanted["name"],
        mechanism=mechanism,
        salt=wanted["salt"],
        iterations=wanted["iterations"],
        stored_key=stored_key,
        server_key=server_key,
    )
