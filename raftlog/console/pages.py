"""The pages of the console. Each takes a `Look` and returns a template with its values.

A page asks the view, which asks brokers once in two seconds at most, so the same function draws the page and, every two
seconds, its live part. Lists are searched, sorted and cut into pages here: a browser never gets ten thousand rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

import raftlog
from raftlog._core import rebalance
from raftlog._core.descriptions import GroupListing, PartitionDescription, PartitionLag, TopicDescription
from raftlog.cli.groups.reset_offsets import Reset, Target, parse_time_ms, resets_to
from raftlog.cli.nodes.cluster import Picture
from raftlog.cli.partitions.health import is_under_replicated, state_of
from raftlog.cli.partitions.moving import Move, present
from raftlog.console.access import Session
from raftlog.console.actions import why_not
from raftlog.console.messages import (
    LONGEST_ALONE,
    MOST_FOUND_BYTES,
    OUTCOMES,
    AuditFilter,
    Query,
    arrow_of,
    audit_line,
    search,
    table_of,
)
from raftlog.console.rebalance import AT_A_TIME
from raftlog.console.view import AUDIT_TOPIC, Answer, View
from raftlog.errors import (
    AuthorizationError,
    GroupIdNotFound,
    InvalidRequestError,
    ResourceNotFound,
)
from raftlog.security import CLUSTER_NAME, AclOperation, ResourceType
from raftlog.types import TopicPartition

T = TypeVar("T")

ROWS: Final = 50
"""Rows of a page of a list."""
MOST_GROUPS_OF_OVERVIEW: Final = 20


@dataclass(frozen=True)
class Look:
    """One request for a page. `fields`: its query; `names`: the parts of its path."""

    view: View
    session: Session
    fields: Mapping[str, str]
    names: Mapping[str, str]
    path: str
    read_only: bool

    def why_not(self, action: str, name: str = "") -> str | None:
        """Return why this user may not make that change; None: a page offers it."""
        return why_not(self.view, action, name)

    def may_audit(self) -> bool:
        """Whether this user may read audit records, as far as is known; the page says whether there are any."""
        return not self.view.audited().refused

    def may_look(self) -> bool:
        """Whether this user may see the quorum, users and ACLs."""
        may = self.view.operations(ResourceType.CLUSTER)
        return may is None or AclOperation.DESCRIBE in may


@dataclass(frozen=True)
class Page:
    """A template and its values. `answers`: those that it shows, so that the page says which are old."""

    template: str
    title: str
    values: dict[str, Any]
    answers: list[Answer[Any]] = field(default_factory=list)


class Slice(NamedTuple):
    """Some rows of a list: page `page` of `pages`; `total` rows match the search."""

    rows: Sequence[Any]
    total: int
    page: int
    pages: int


def cut(rows: Sequence[T], fields: Mapping[str, str]) -> Slice:
    """Return the rows of the requested page."""
    pages = max(1, math.ceil(len(rows) / ROWS))
    wanted = fields.get("page", "")
    page = min(pages, max(1, int(wanted))) if wanted.isdecimal() and len(wanted) < 10 else 1
    return Slice(rows[(page - 1) * ROWS : page * ROWS], len(rows), page, pages)


def matching(rows: Iterable[T], fields: Mapping[str, str], name: Callable[[T], str]) -> list[T]:
    """Return the rows whose name contains the search text."""
    text = fields.get("q", "").strip().lower()
    return [row for row in rows if text in name(row).lower()]


def in_order(rows: list[T], fields: Mapping[str, str], keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """Return the rows in the requested order: `sort=KEY`, or `sort=-KEY` for the largest first."""
    wanted = fields.get("sort", "")
    key = keys.get(wanted.removeprefix("-"))
    return rows if key is None else sorted(rows, key=key, reverse=wanted.startswith("-"))


# Overview


def overview(look: Look) -> Page:
    """Health, throughput, lag, ISR and quorum at a glance."""
    view = look.view
    cluster, topics, quorum, groups = view.cluster(), view.topics(), view.quorum(), view.groups()
    appended = view.records_appended()
    health = topics.value.health if topics.value is not None else None
    rate = None
    if appended.value is not None and appended.error is None:
        rate = view.note_total("records", appended.value)
    listed = sorted(groups.value or (), key=lambda each: each.state == "empty")[:MOST_GROUPS_OF_OVERVIEW]
    lags = {group: lag_of(found) for group, found in view.lags(each.group_id for each in listed).items()}
    report = view.doctor()
    if lags:
        view.note("lag", sum(each.records for each in lags.values()))
    return Page(
        "overview.html",
        "Overview",
        {
            "cluster": cluster.value,
            "quorum": quorum,
            "health": health,
            "rate": rate,
            "lags": sorted(lags.items(), key=lambda each: -each[1].records)[:8],
            "groups": groups.value,
            "without_members": {each.group_id for each in listed if each.state == "empty"},
            "report": report,
            "report_s": view.age_s(report),
            "plots": [
                ("records", "Records per second", view.plot("records")),
                ("lag", "Lag of groups, in records", view.plot("lag")),
            ],
        },
        [cluster, topics, quorum, appended, groups],
    )


class Lag(NamedTuple):
    """The lag of a group, summed: records, and the age in seconds of its oldest unread record; None: unknown."""

    records: int = 0
    seconds: float | None = None
    unknown: int = 0


def lag_of(parts: Mapping[TopicPartition, PartitionLag] | None) -> Lag:
    """Return the sum over the partitions of a group."""
    known = [part for part in (parts or {}).values() if part.lag is not None]
    ages = [part.lag_seconds for part in known if part.lag_seconds is not None]
    return Lag(sum(part.lag or 0 for part in known), max(ages, default=None), len(parts or {}) - len(known))


# Brokers


def brokers(look: Look) -> Page:
    """Load, disks, leaderships and states of all brokers."""
    cluster, sizes = look.view.cluster(), look.view.sizes()
    of_broker = sizes.value.of_broker if sizes.value is not None else {}
    found = cluster.value.brokers if cluster.value is not None else []
    values = {
        "cluster": cluster.value,
        "brokers": [(broker, state_of(broker), of_broker.get(broker.broker_id)) for broker in found],
        "most_replicas": max((broker.replicas for broker in found), default=0),
        "progress": look.view.rebalance.progress if look.view.rebalance is not None else None,
    }
    return Page("brokers.html", "Brokers", values, [cluster, sizes])


def broker(look: Look) -> Page:
    """One broker: itself, its directories, its config."""
    broker_id = _number(look.names["broker"])
    cluster = look.view.cluster()
    known = {each.broker_id: each for each in cluster.value.brokers} if cluster.value is not None else {}
    if cluster.value is not None and broker_id not in known:
        raise ResourceNotFound(f"there is no broker {broker_id}")
    node = look.view.ask(f"node {broker_id}", lambda: look.view.admin.describe_node(broker_id), ahead=True)
    configs = sorted(node.value.configs.items()) if node.value is not None else []
    values = {
        "broker": known.get(broker_id),
        "broker_id": broker_id,
        "state": state_of(known[broker_id]) if broker_id in known else "unknown",
        "node": node.value,
        "configs": matching(configs, look.fields, lambda each: each[0]),
    }
    return Page("broker.html", f"Broker {broker_id}", values, [cluster, node])


class Plan(NamedTuple):
    """Moves that even out or empty brokers. `problem`: why there can be none. `shown`: the first of them, with their
    replicas now and the bytes to copy."""

    problem: str | None
    shown: list[tuple[Move, tuple[int, ...], int]]
    total: int
    bytes: int
    wanted: str
    ids: list[int]
    before: dict[int, rebalance.Load]
    after: dict[int, rebalance.Load]
    under_way: list[TopicPartition]
    answers: list[Answer[Any]]


def plan(look: Look) -> Page:
    """A plan that evens out the load of brokers, or empties one, before anything is changed."""
    leaving = _number(look.fields["leaving"]) if look.fields.get("leaving") else None
    by = rebalance.Balance.BYTES if look.fields.get("by") == "bytes" else rebalance.Balance.REPLICAS
    made = look.view.ask(f"plan {leaving} {by.value}", lambda: _planned(look.view, leaving, by), ahead=True)
    found = made.value or Plan(None, [], 0, 0, "", [], {}, {}, [], [made])
    values = {
        "known": made.value is not None,
        **found._asdict(),
        "moves": found.shown,
        "by": by.value,
        "leaving": leaving,
        "at_a_time": AT_A_TIME,
        "progress": look.view.rebalance.progress if look.view.rebalance is not None else None,
    }
    title = "Rebalance" if leaving is None else f"Decommission broker {leaving}"
    return Page("plan.html", title, values, found.answers)


def _planned(view: View, leaving: int | None, by: rebalance.Balance) -> Plan:
    picture, answers = picture_of(view)
    moves: list[Move] = []
    problem = None
    try:
        moves = picture.moves_to(rebalance.plan(picture.placed, picture.places(leaving), by=by, sizes=picture.sizes))
    except rebalance.CannotPlace as refused:
        problem = f"{refused}; add a broker, or lower the replication factor, first"
    ids = [each.broker_id for each in picture.brokers]
    after = {**picture.placed, **{move.part: move.replicas for move in moves}}
    return Plan(
        problem=problem,
        shown=[(move, picture.placed[move.part], copied(picture, move)) for move in moves[:ROWS]],
        total=len(moves),
        bytes=sum(copied(picture, move) for move in moves),
        wanted=as_text(moves),
        ids=ids,
        before=rebalance.loads(picture.placed, ids, picture.sizes),
        after=rebalance.loads(after, ids, picture.sizes),
        under_way=moving(picture.topics.values()),
        answers=answers,
    )


def moving(topics: Iterable[TopicDescription]) -> list[TopicPartition]:
    """Return the partitions that move to other brokers."""
    return [
        TopicPartition(topic.name, part.partition)
        for topic in topics
        for part in topic.partitions
        if part.adding_replicas or part.removing_replicas
    ]


def as_text(moves: Sequence[Move]) -> str:
    """Return the moves of a plan as the form carries them, so that what was shown is what is done."""
    return " ".join(f"{move.part.topic}:{move.part.partition}:{','.join(map(str, move.replicas))}" for move in moves)


def copied(picture: Picture, move: Move) -> int:
    """Return how many bytes a move copies."""
    return picture.sizes.get(move.part, 0) * len(set(move.replicas) - set(picture.placed[move.part]))


def picture_of(view: View) -> tuple[Picture, list[Answer[Any]]]:
    """Return the cluster as a plan needs it, and the answers that it is made of."""
    # A page may show a plan that is some seconds old, but none that was made of older answers: they could lack a topic.
    cluster, topics, sizes = view.cluster(), view.topics(ahead=False), view.sizes()
    of_part = sizes.value.of_part if sizes.value is not None else {}
    free = {broker: size.usable for broker, size in sizes.value.of_broker.items()} if sizes.value is not None else {}
    known = topics.value.by_name if topics.value is not None else {}
    placed = {move.part: move.replicas for move in present(known.values())}
    found = cluster.value.brokers if cluster.value is not None else []
    return Picture(list(found), known, placed, {part: of_part.get(part, 0) for part in placed}, free), [cluster, topics]


# Topics


class TopicRow(NamedTuple):
    """A topic in the list. `size_bytes`: of one replica of each partition; None: unknown, it may be very young."""

    name: str
    internal: bool
    partitions: int
    replication_factor: int
    under_replicated: int
    leaderless: int
    size_bytes: int | None


def topics(look: Look) -> Page:
    """All topics: searched, sorted, in pages. Only the topics of the page become rows."""
    found, sizes = look.view.topics(), look.view.sizes()
    of_topic = sizes.value.of_topic if sizes.value is not None else {}
    every = list(found.value.by_name.values()) if found.value is not None else []
    internal = look.fields.get("internal") == "1"
    only_bad = look.fields.get("bad") == "1"
    listed = [
        topic
        for topic in matching(every, look.fields, lambda topic: topic.name)
        if (_has_problem(topic) if only_bad else internal or not topic.internal)
    ]
    keys: dict[str, Callable[[TopicDescription], Any]] = {
        "name": lambda topic: topic.name,
        "partitions": lambda topic: len(topic.partitions),
        "size": lambda topic: of_topic.get(topic.name, 0),
        "under_replicated": lambda topic: sum(map(is_under_replicated, topic.partitions)),
    }
    part = cut(in_order(listed, look.fields, keys), look.fields)
    rows = [
        TopicRow(
            topic.name,
            topic.internal,
            len(topic.partitions),
            max((len(part.replicas) for part in topic.partitions), default=0),
            sum(map(is_under_replicated, topic.partitions)),
            sum(part.leader < 0 for part in topic.partitions),
            of_topic.get(topic.name),
        )
        for topic in part.rows
    ]
    values = {
        "list": part._replace(rows=rows),
        "hidden": sum(topic.internal for topic in every) if not internal else 0,
        "known": found.value is not None,
    }
    return Page("topics.html", "Topics", values, [found, sizes])


def _has_problem(topic: TopicDescription) -> bool:
    return any(part.leader < 0 or is_under_replicated(part) for part in topic.partitions)


def _topic(look: Look) -> tuple[TopicDescription | None, Answer[Any]]:
    """Return a topic and the answer that has it. None: not known yet; until then pages ask nothing else about it."""
    name = look.names["topic"]
    found = look.view.topics()
    topic = found.value.by_name.get(name) if found.value is not None else None
    if topic is None:
        # It may be younger than the last answer, and one topic is told sooner than all.
        asked = look.view.topic(name)
        if asked.error is not None and asked.value is None:  # also while it is asked for again
            raise asked.error
        return asked.value, asked
    return topic, found


class PartitionRow(NamedTuple):
    """A partition with the offsets that its leader tells; None: unknown."""

    part: PartitionDescription
    start: int | None
    high_watermark: int | None
    end: int | None
    lags: dict[int, int]
    size_bytes: int | None


def topic(look: Look) -> Page:
    """Partitions of a topic: replicas, ISR, offsets, sizes."""
    name = look.names["topic"]
    found, answer = _topic(look)
    replicas = look.view.replicas(name) if found is not None else Answer()
    sizes = look.view.sizes()
    of_part = sizes.value.of_part if sizes.value is not None else {}
    rows = []
    for part in found.partitions if found is not None else ():
        place = TopicPartition(name, part.partition)
        seen = (replicas.value or {}).get(place)
        rows.append(
            PartitionRow(
                part,
                seen.log_start_offset if seen else None,
                seen.high_watermark if seen else None,
                seen.log_end_offset if seen else None,
                {each.broker_id: each.lag for each in seen.replicas} if seen else {},
                of_part.get(place),
            )
        )
    ends = [row.end for row in rows if row.end is not None]
    rate = look.view.note_total(f"topic {name}", sum(ends)) if len(ends) == len(rows) and rows else None
    values = {
        "topic": found,
        "name": name,
        "list": cut(rows, look.fields),
        "rate": rate,
        "records": sum(row.end - row.start for row in rows if row.end is not None and row.start is not None)
        if ends
        else None,
        "size_bytes": sizes.value.of_topic.get(name) if sizes.value is not None else None,
        "under_way": [] if found is None else moving([found]),
        "plots": [(f"topic {name}", "Records per second", look.view.plot(f"topic {name}"))],
    }
    return Page("topic.html", name, values, [answer, replicas])


def topic_config(look: Look) -> Page:
    """The config of a topic, with the default and the documentation beside each key."""
    name = look.names["topic"]
    found, answer = _topic(look)
    configs: Answer[Mapping[str, Any]] = Answer()
    if found is not None:
        configs = look.view.ask(f"config {name}", lambda: look.view.admin.describe_configs(topic=name))
    rows = matching(sorted((configs.value or {}).values()), look.fields, lambda each: each.key)
    return Page(
        "topic_config.html",
        name,
        {"name": name, "topic": found, "configs": rows, "known": configs.value is not None, "unseen": configs.refused},
        [answer, configs],
    )


def messages(look: Look) -> Page:
    """Records of a topic, searched and filtered."""
    name = look.names["topic"]
    found, answer = _topic(look)
    problem = None
    try:
        query = Query.parse(look.fields)
    except InvalidRequestError as error:
        query, problem = Query(), str(error)
    asked = answer
    if problem is None and found is not None:
        asked = look.view.records(f"{name} {query}", lambda: _search(look.view, name, query))
        problem = str(asked.error) if asked.error is not None else None
    records = asked.value if asked is not answer else None
    values = {
        "name": name,
        "topic": found,
        "query": query,
        "problem": problem,
        "found": records,
        "reading": asked.pending and problem is None,
        "table": table_of(records.records) if query.view == "table" and records else None,
        "live": look.fields.get("live") == "1",
    }
    return Page("messages.html", name, values, [answer])


def _search(view: View, topic: str, query: Query) -> Any:
    config = {
        **view.settings,
        "enable.auto.commit": False,
        "default.api.timeout.ms": 5000,
        "fetch.max.bytes": MOST_FOUND_BYTES,
    }
    with raftlog.Consumer(view.bootstrap, config=config) as consumer:
        return search(consumer, topic, query)


def message(look: Look) -> Page:
    """One record, whole."""
    name, partition, offset = look.names["topic"], _number(look.names["partition"]), _number(look.names["offset"])
    query = Query(begin="offset", partition=partition, offset=offset, limit=1)
    asked = look.view.records(f"{name} {query}", lambda: _search(look.view, name, query))
    if asked.value is None and asked.error is not None:
        raise asked.error
    found = asked.value.records if asked.value is not None else ()
    record = next((each for each in found if each.offset == offset), None)
    if record is None and not asked.pending:
        raise ResourceNotFound(f"{name}-{partition} has no record at offset {offset}: it was removed, or is a marker")
    form = look.fields.get("form", "auto")
    is_arrow = record is not None and arrow_of(record.value, 0) is not None
    values = {
        "record": record,
        "name": name,
        "form": form,
        "longest": LONGEST_ALONE,
        "is_arrow": is_arrow,
        "table": table_of([record]) if record is not None and is_arrow and form in ("auto", "arrow") else None,
    }
    return Page("message.html", f"{name}-{partition} at {offset}", values)


def new_topic(look: Look) -> Page:
    """The form that creates a topic."""
    cluster = look.view.cluster()
    alive = sum(not each.fenced for each in cluster.value.brokers) if cluster.value is not None else 1
    return Page("new_topic.html", "Create a topic", {"brokers": alive, "factor": min(3, alive)}, [cluster])


# Groups


def groups(look: Look) -> Page:
    """All groups with their lags; lags are asked for those on the page only."""
    found = look.view.groups()
    state = look.fields.get("state", "")
    rows = matching(
        (each for each in found.value or () if state in ("", each.state)), look.fields, lambda each: each.group_id
    )
    keys: dict[str, Callable[[GroupListing], Any]] = {
        "name": lambda row: row.group_id,
        "members": lambda row: row.members,
        "state": lambda row: row.state,
    }
    part = cut(in_order(rows, look.fields, keys), look.fields)
    values = {
        "list": part,
        "lags": {group: lag_of(lag) for group, lag in look.view.lags(each.group_id for each in part.rows).items()},
        "states": sorted({each.state for each in found.value or ()}),
        "known": found.value is not None,
    }
    return Page("groups.html", "Groups", values, [found])


def group(look: Look) -> Page:
    """One group: members, assignment, lag by partition, and as a plot."""
    group_id = look.names["group"]
    described = look.view.ask(f"group {group_id}", lambda: look.view.admin.describe_group(group_id))
    lags = look.view.lag(group_id)
    if described.value is None and isinstance(described.error, GroupIdNotFound):
        raise described.error
    told = lags.value is not None and (not lags.value or any(each.lag is not None for each in lags.value.values()))
    total = lag_of(lags.value) if told else None
    if total is not None:
        look.view.note(f"lag {group_id}", total.records)
        if total.seconds is not None:
            look.view.note(f"lag in seconds {group_id}", total.seconds)
    names = {member.member_id: member.client_id for member in described.value.members} if described.value else {}
    values = {
        "group_id": group_id,
        "group": described.value,
        "lag": total,
        "list": cut(sorted((lags.value or {}).items()), look.fields),
        "names": names,
        "plots": [
            (f"lag {group_id}", "Lag in records", look.view.plot(f"lag {group_id}")),
            ("seconds", "Age of the oldest unread record, in seconds", look.view.plot(f"lag in seconds {group_id}")),
        ],
    }
    return Page("group.html", group_id, values, [described, lags])


TARGETS: Final = ("earliest", "latest", "offset", "shift", "time")


class Preview(NamedTuple):
    """What a reset would change. `topics`: those in which the group has offsets. `problem`: why it cannot be."""

    topics: list[str]
    changes: list[Reset]
    problem: str | None = None


def reset(look: Look) -> Page:
    """What a reset of a group's offsets would change, before it is done."""
    group_id = look.names["group"]
    topic, to, value = (look.fields.get(name, "").strip() for name in ("topic", "to", "value"))
    asked = look.view.ask(
        f"reset {group_id} {[topic, to, value]}", lambda: _preview(look.view.admin, group_id, topic, to, value)
    )
    if asked.value is None and asked.error is not None:
        raise asked.error
    groups = look.view.groups()
    known = groups.value is not None
    found = asked.value or Preview([], [])
    values = {
        "group_id": group_id,
        "to": to,
        "value": value,
        "topic": topic,
        **found._asdict(),
        "known": asked.value is not None,
        "wanted": " ".join(f"{each.part.topic}:{each.part.partition}:{each.new}" for each in found.changes),
        "members": next((each.members for each in groups.value or () if each.group_id == group_id), 0)
        if known
        else None,
    }
    return Page("reset.html", f"Reset offsets of {group_id}", values, [asked, groups])


def _preview(admin: raftlog.Admin, group_id: str, topic: str, to: str, value: str) -> Preview:
    committed = admin.group_offsets(group_id)
    topics = sorted({part.topic for part in committed})
    parts = sorted(part for part in committed if topic in ("", part.topic))
    if topic and not parts:
        parts = [TopicPartition(topic, each.partition) for each in admin.describe_topic(topic).partitions]
    if not to:
        return Preview(topics, [])
    try:
        return Preview(topics, resets_to(admin, group_id, _target(to, value), parts, committed))
    except (InvalidRequestError, ValueError) as error:
        return Preview(topics, [], str(error))


def _target(to: str, value: str) -> Target:
    if to not in TARGETS:
        raise InvalidRequestError(f"{to!r}: choose one of {', '.join(TARGETS)}")
    whole = value.removeprefix("-").isdecimal() and len(value) < 19
    if to in ("offset", "shift") and not whole:
        raise InvalidRequestError(f"{value!r}: write a whole number")
    return Target(
        earliest=to == "earliest",
        latest=to == "latest",
        current=False,
        offset=int(value) if to == "offset" else None,
        shift=int(value) if to == "shift" else None,
        time_ms=parse_time_ms(value) if to == "time" else None,
        plan=None,
    )


# Transactions, quorum, security


def transactions(look: Look) -> Page:
    """Open transactions and stages, and hanging ones."""
    found = look.view.transactions()
    only_open = look.fields.get("all") != "1"
    rows = [each for each in found.value or () if not only_open or each.started_ms]
    rows = matching(rows, look.fields, lambda each: f"{each.transactional_id} {each.sink_id} {each.producer_id}")
    hanging = look.view.hanging()
    values = {
        "list": cut(rows, look.fields),
        "hanging": hanging.value or [],
        "only_open": only_open,
        "known": found.value is not None,
    }
    return Page("transactions.html", "Transactions", values, [found])


def transaction(look: Look) -> Page:
    """One transactional id."""
    name = look.names["id"]
    found = look.view.ask(f"transaction {name}", lambda: look.view.admin.describe_transaction(name))
    if found.value is None and found.error is not None:
        raise found.error
    return Page("transaction.html", name, {"found": found.value, "name": name}, [found])


def quorum(look: Look) -> Page:
    """The metadata quorum: voters, brokers that follow it, and the epochs seen since the console started."""
    found, cluster = look.view.quorum(), look.view.cluster()
    if found.value is not None and found.value.leader_id >= 0:
        look.view.note_epoch(found.value.leader_epoch, found.value.leader_id)
    values = {"quorum": found.value, "cluster": cluster.value, "epochs": look.view.epochs()}
    return Page("quorum.html", "Metadata quorum", values, [found, cluster])


def security(look: Look) -> Page:
    """Users, ACLs and roles: who may do what."""
    users = look.view.ask("users", look.view.admin.describe_users)
    acls = look.view.ask("acls", look.view.admin.describe_acls)
    roles = look.view.ask("roles", look.view.admin.describe_roles)
    found = matching(
        acls.value or (), look.fields, lambda each: f"{each.principal} {each.resource_type.name} {each.resource_name}"
    )
    order = sorted(found, key=lambda each: (each.principal, each.resource_type, each.resource_name, each.operation))
    values = {"users": users, "acls": acls, "roles": roles, "list": cut(order, look.fields)}
    return Page("security.html", "Security", values)


class RightsRow(NamedTuple):
    """One resource or one principal, and what is allowed there. `name`: what the row is about."""

    name: str
    rights: list[Any]


def access(look: Look) -> Page:
    """Who may do what, and why: of one principal, of one resource, or of both."""
    from raftlog.console import rights as core  # here: its tables take memory

    found = look.view.rights()
    if isinstance(found.error, AuthorizationError):
        raise found.error
    who, name = (look.fields.get(each, "").strip() for each in ("principal", "name"))
    kinds = {each.name.lower(): each for each in ResourceType if each is not ResourceType.ANY}
    kind = kinds.get(look.fields.get("type", ""), ResourceType.TOPIC)
    if kind is ResourceType.CLUSTER:
        name = CLUSTER_NAME
    host = core.host_of(look.fields.get("host", ""))
    principal = core.principal_of(who)
    rules = found.value
    answers: list[Answer[Any]] = [found]
    rows: Slice = cut([], {})
    alone: list[Any] = []
    if rules is not None and principal and name:
        alone = rules.rights(principal, host, kind, name)
    elif rules is not None and (principal or name):
        if principal:
            names, listed = _resources(look.view, kind)
            answers.append(listed)
            asked = f"rights {principal} {host} {kind.name}"
            may = look.view.ask(
                asked,
                lambda: [each for each in names if rules.may_something(principal, host, kind, each)],
                ahead=True,
            )
            answers.append(may)
            part = cut(may.value or [], look.fields)
            rows = part._replace(
                rows=[RightsRow(each, rules.rights(principal, host, kind, each)) for each in part.rows]
            )
        else:
            part = cut(tuple(dict.fromkeys([*rules.principals, *core.ANYBODY])), look.fields)
            rows = part._replace(rows=[RightsRow(each, rules.rights(each, host, kind, name)) for each in part.rows])
    values = {
        "rules": rules,
        "principal": principal,
        "kind": kind.name.lower(),
        "kinds": {key: key.replace("_", " ") for key in kinds},
        "name": name,
        "host": host,
        "alone": alone,
        "list": rows,
        "unknown": rules is not None and bool(principal) and not rules.names(principal),
        "known": all(each.value is not None for each in answers),
    }
    return Page("access.html", "Who may what", values, answers)


def _resources(view: View, kind: ResourceType) -> tuple[list[str], Answer[Any]]:
    """Return the names of the resources of a type, in order, and the answer that has them."""
    match kind:
        case ResourceType.TOPIC:
            topics = view.topics()
            return sorted(topics.value.by_name if topics.value is not None else ()), topics
        case ResourceType.GROUP:
            groups = view.groups()
            return sorted(each.group_id for each in groups.value or ()), groups
        case ResourceType.TRANSACTIONAL_ID:
            open_ = view.transactions()
            return sorted({each.transactional_id for each in open_.value or () if each.transactional_id}), open_
        case _:
            return [CLUSTER_NAME], view.cluster()


MOST_AUDIT_LINES: Final = 100


def audit(look: Look) -> Page:
    """Records of the brokers' audit log: who did what, on what, when, from where, and how it ended."""
    asked: Answer[Any] = look.view.audited()
    is_off, problem = asked.value is False, None
    begin = "time" if look.fields.get("time") else "newest"
    names = ("who", "what", "on", "host", "outcome")
    query = Query()
    try:
        query = replace(
            Query.parse({"begin": begin, "time": look.fields.get("time", "")}),
            limit=MOST_AUDIT_LINES,
            audit=AuditFilter(*(look.fields.get(name, "").strip() for name in names)),
        )
    except InvalidRequestError as error:
        problem = str(error)
    found = None
    if asked.value and problem is None:
        asked = look.view.records(f"{AUDIT_TOPIC} {query}", lambda: _search(look.view, AUDIT_TOPIC, query))
        found = asked.value
    if isinstance(asked.error, AuthorizationError):
        raise asked.error
    problem = problem or (str(asked.error) if asked.error is not None else None)
    records = found.records if found is not None else []
    values = {
        "problem": problem,
        "is_off": is_off,
        "found": found,
        "reading": asked.pending,
        "lines": [(record, audit_line(record.value)) for record in records],
        "filters": query.filters,
        "outcomes": OUTCOMES,
    }
    return Page("audit.html", "Audit", values)


def _number(text: str) -> int:
    if not (text.isdecimal() and len(text) < 19):
        raise ResourceNotFound(f"{text!r} is not a number")
    return int(text)


PAGES: Final[Mapping[str, Callable[[Look], Page]]] = {
    "/": overview,
    "/brokers": brokers,
    "/brokers/plan": plan,
    "/brokers/{broker}": broker,
    "/topics": topics,
    "/create-topic": new_topic,
    "/topics/{topic}": topic,
    "/topics/{topic}/config": topic_config,
    "/topics/{topic}/messages": messages,
    "/topics/{topic}/messages/{partition}/{offset}": message,
    "/groups": groups,
    "/groups/{group:path}/reset": reset,
    "/groups/{group:path}": group,
    "/transactions": transactions,
    "/transactions/{id:path}": transaction,
    "/quorum": quorum,
    "/security": security,
    "/security/access": access,
    "/audit": audit,
}
"""The pages by path, in the order in which they are tried."""
