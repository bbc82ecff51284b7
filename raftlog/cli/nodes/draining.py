"""`raftlog broker drain` and `undrain`: leaderships leave a broker before it stops, and come back afterwards.

Also here: `until_done`, by which commands wait for a cluster, and pure functions that tell whether a broker may stop,
and which partitions it still leads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

import raftlog
from raftlog._core.descriptions import PartitionDescription, TopicDescription
from raftlog._core.words import counted, some
from raftlog.cli.client_config import connect_admin, default_to
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BOOTSTRAP_VARIABLE, Output, OutputOption, print_done, print_note
from raftlog.cli.partitions import health, moving
from raftlog.cli.servers import ask_server_packages
from raftlog.config import parse_duration_ms
from raftlog.errors import (
    ElectionNotNeeded,
    PreferredLeaderNotAvailable,
    RaftlogError,
    RequestTimedOut,
    UnsupportedVersion,
)
from raftlog.types import TopicPartition

LOOK_EVERY_S: Final = 1.0


def seconds(text: str | float) -> float:
    """Return the seconds of a `--timeout`: a number of seconds, or a duration such as 90s or 2m.

    Raises:
        typer.BadParameter: it is neither, or negative.
    """
    try:
        given = float(text)
    except ValueError:
        try:
            given = parse_duration_ms(text) / 1000
        except ValueError:
            raise typer.BadParameter(f"{text!r}: write seconds, or a duration such as 90s or 2m") from None
    if not 0 <= given < float("inf"):
        raise typer.BadParameter(f"{text!r}: write at least 0 seconds, or a duration such as 90s or 2m")
    return given


def until_done(look: Callable[[], str], timeout_s: float, late: str, *, every_s: float = LOOK_EVERY_S) -> None:
    """Call `look` until it returns "". Any other text names what the command waits for; print it when it changes.

    A retriable error of `look` counts as such a text.

    Raises:
        RequestTimedOut: the time is up; its message begins with `late` and ends with the last text.
        RaftlogError: `look` has failed with an error that is not retriable.
    """
    deadline_s = time.monotonic() + timeout_s
    said = ""
    while True:
        try:
            waits = look()
            if not waits:
                return
        except RaftlogError as error:
            if not error.retriable:
                raise
            waits = str(error)
        if waits != said:
            said = waits
            print_note(f"waiting: {waits}")
        if time.monotonic() >= deadline_s:
            raise RequestTimedOut(f"{late} {timeout_s:g} s: {waits}")
        time.sleep(min(every_s, max(0.0, deadline_s - time.monotonic())))


_NAMED: Final = 5


class NeededPartition(NamedTuple):
    """A partition that needs this broker for acks=all writes, until more of its replicas are in sync."""

    partition: TopicPartition
    isr: tuple[int, ...]
    min_insync_replicas: int

    def __str__(self) -> str:
        return f"{self.partition} (in sync: {', '.join(map(str, self.isr))}; {moving.KEY}={self.min_insync_replicas})"


def needed(
    topics: Iterable[TopicDescription], broker_id: int, min_insync_replicas: Callable[[str], int]
) -> list[NeededPartition]:
    """Return the partitions to wait for before a broker stops.

    Partitions that would fall below min.insync.replicas even with all replicas in sync are left out: waiting would not
    help them.
    """
    found = []
    for name, part in _partitions(topics):
        if broker_id not in part.isr or not health.is_under_replicated(part):
            continue
        least = min_insync_replicas(name)
        if len(part.isr) - 1 < least <= len(_settled(part)) - 1:
            found.append(NeededPartition(TopicPartition(name, part.partition), tuple(part.isr), least))
    return found


class Leaderships(NamedTuple):
    """The leaderships that a drained broker still has.

    `moving`: another replica can lead, now or once it is in sync. `staying`: no other replica can lead.
    """

    moving: list[TopicPartition]
    staying: list[TopicPartition]


def leaderships(topics: Iterable[TopicDescription], broker_id: int, drained: Collection[int]) -> Leaderships:
    """Return the leaderships of a broker that is being drained; `drained`: all drained brokers."""
    moving: list[TopicPartition] = []
    staying: list[TopicPartition] = []
    for name, part in _partitions(topics):
        others = [replica for replica in _settled(part) if replica != broker_id and replica not in drained]
        if part.leader == broker_id:
            (moving if others else staying).append(TopicPartition(name, part.partition))
            continue
        ready = any(member in part.isr and member not in part.offline_replicas for member in others)
        if part.leader < 0 and broker_id in part.isr and ready:  # between two leaders
            moving.append(TopicPartition(name, part.partition))
    return Leaderships(moving, staying)


class Astray(NamedTuple):
    """A partition that its preferred leader does not lead. `ready`: that broker is in sync and may lead it."""

    partition: TopicPartition
    ready: bool


def astray(topics: Iterable[TopicDescription], broker_id: int) -> list[Astray]:
    """Return the partitions whose preferred leader is this broker, but which it does not lead."""
    return [
        Astray(
            TopicPartition(name, part.partition),
            ready=part.leader >= 0 and broker_id in part.isr and broker_id not in part.offline_replicas,
        )
        for name, part in _partitions(topics)
        if part.replicas[0] == broker_id and part.leader != broker_id
    ]


def behind(topics: Iterable[TopicDescription], broker_id: int) -> list[TopicPartition]:
    """Return the partitions of which the broker has a replica that is not in sync.

    Partitions without a leader are left out: their replicas cannot come in sync.
    """
    return [
        TopicPartition(name, part.partition)
        for name, part in _partitions(topics)
        if broker_id in _settled(part)
        and part.leader >= 0
        and (broker_id not in part.isr or broker_id in part.offline_replicas)
    ]


def named(partitions: Sequence[object]) -> str:
    """Return the names of the first partitions, and the number of further ones."""
    return some(partitions, _NAMED)


def _partitions(topics: Iterable[TopicDescription]) -> Iterator[tuple[str, PartitionDescription]]:
    for topic in topics:
        for part in topic.partitions:
            yield topic.name, part


def _settled(part: PartitionDescription) -> set[int]:
    """Return the replicas that are not being added."""
    return set(part.replicas) - set(part.adding_replicas)


DRAIN_LOOK_EVERY_S: Final = 0.25
_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_PRINT_IDENTITY = """\
import json, os, sys
from pathlib import Path
from broker.config.config import BrokerConfig
from raftlog.errors import InvalidConfig
try:
    config = BrokerConfig.load(file=Path(sys.argv[1]), environment=os.environ)
    client = config.client_settings()
except InvalidConfig as error:
    sys.exit(str(error))
print(json.dumps({"node_id": config.node_id, "is_broker": config.is_broker,
                  "client": client,
                  "addresses": [each for each in (config.listener, config.advertised_listener) if each]}))
"""

IdArgument = Annotated[
    int | None, typer.Argument(metavar="ID", min=0, show_default=False, help="The broker's node.id.")
]
SelfOption = Annotated[
    bool, typer.Option("--self", metavar="", help="The broker of the configuration file --config, instead of an ID.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", dir_okay=False, exists=True, help="The server's TOML file, for --self."),
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done, or at once.")]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        parser=seconds,
        help="How long to wait, in seconds or as 90s or 2m; then exit with 1.",
    ),
]
BootstrapOption = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=BOOTSTRAP_VARIABLE,
        metavar="HOST:PORT,...",
        show_default=BOOTSTRAP_DEFAULT,
        help="Addresses of servers of the cluster; by default, --self asks the broker itself.",
    ),
]


class Target(NamedTuple):
    """A broker, and addresses of its cluster."""

    broker_id: int
    bootstrap: str


def drain(
    broker_id: IdArgument = None,
    this_one: SelfOption = False,
    config: ConfigOption = None,
    until_restart: Annotated[
        bool,
        typer.Option("--until-restart", metavar="", help="The broker's next start undrains it."),
    ] = False,
    wait: WaitOption = True,
    timeout_s: TimeoutOption = 60.0,
    bootstrap: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move all leaderships off a broker, and give it no new replicas, so that clients do not notice its stop.

    The broker keeps its replicas and stays in sync. The command waits until other brokers lead its partitions, and
    until no partition falls below min.insync.replicas when the broker stops. A partition that no other replica can lead
    stays with it; a note names these. The broker stays drained until it is undrained, even if the command times out,
    and after a restart.

    Example: raftlog broker drain 2 && systemctl restart raftlog && raftlog broker undrain 2

    Example: raftlog broker drain --self --config /etc/raftlog/server.toml --until-restart --timeout 60s
    """
    target = _target(broker_id, this_one, config, bootstrap)
    if target is None:
        return
    with connect_admin(target.bootstrap) as admin:
        drained = True
        try:
            admin.alter_broker(target.broker_id, drained=True, until_restart=until_restart)
        except UnsupportedVersion as error:
            if not this_one:
                raise
            print_note(f"note: broker {target.broker_id} hands its leaderships over as it stops: {error}")
            drained = False
        staying = _await_drained(admin, target.broker_id, timeout_s, drained=drained) if wait else []
    if staying:
        print_note(
            f"note: {counted(len(staying), 'partition has', 'partitions have')} no other replica that can lead, and "
            f"cannot be used while the broker is stopped: {named(staying)}"
        )
    message = f"broker {target.broker_id} is {'' if drained else 'not '}drained"
    if wait:
        message += f": no partition falls below {moving.KEY} when it stops"
        if drained and not staying:
            message = f"{message}, and it leads nothing"
    result = {"broker_id": target.broker_id, "drained": drained, "staying": list(map(str, staying))}
    print_done(message, result, output)


def _await_drained(admin: raftlog.Admin, broker_id: int, timeout_s: float, *, drained: bool) -> list[TopicPartition]:
    """Wait until the broker may stop; return the partitions that it still leads because no other replica can."""
    least = moving.known(admin)
    staying: list[TopicPartition] = []
    waits: list[NeededPartition] = []

    def look() -> str:
        nonlocal staying, waits
        topics = admin.describe_topics(None, internal=True)
        waits = needed(topics, broker_id, least)
        said = [f"{counted(len(waits), 'partition needs', 'partitions need')} it: {named(waits)}"] if waits else []
        if drained:
            others = {broker.broker_id for broker in admin.describe_cluster().brokers if broker.drained}
            moving, staying = leaderships(topics, broker_id, others)
            if moving:
                said.append(f"{counted(len(moving), 'leadership')} to move: {named(moving)}")
        return "; ".join(said)

    state = "drained, but still needed" if drained else "still needed"
    try:
        until_done(look, timeout_s, f"broker {broker_id} is {state} after", every_s=DRAIN_LOOK_EVERY_S)
    except RequestTimedOut as error:
        if not drained:
            raise
        first = "start the brokers of replicas that are out of sync; " if waits else ""
        raise RequestTimedOut(f"{error}; {first}raftlog broker undrain {broker_id} undoes it") from None
    return staying


def undrain(
    broker_id: IdArgument = None,
    this_one: SelfOption = False,
    config: ConfigOption = None,
    wait: WaitOption = True,
    timeout_s: TimeoutOption = 60.0,
    bootstrap: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a broker lead and get replicas again; the leaderships of partitions that prefer it come back.

    The command waits until the broker's replicas are in sync and these leaderships are back. If the command times out,
    the broker is undrained all the same, and the controller moves the remaining leaderships later
    (auto.leader.rebalance.enable).

    Example: raftlog broker undrain 2
    """
    target = _target(broker_id, this_one, config, bootstrap)
    if target is None:
        return
    moved: set[TopicPartition] = set()
    with connect_admin(target.bootstrap) as admin:
        admin.alter_broker(target.broker_id, drained=False)

        def look() -> str:
            topics = admin.describe_topics(None, internal=True)
            away = astray(topics, target.broker_id)
            moved.update(each.partition for each in away if each.ready)
            _elect(admin, [each.partition for each in away if each.ready])
            said = []
            if lagging := behind(topics, target.broker_id):
                said.append(f"{counted(len(lagging), 'replica')} to come in sync: {named(lagging)}")
            if waits := [each.partition for each in away]:
                said.append(f"{counted(len(waits), 'leadership')} to come back: {named(waits)}")
            return "; ".join(said)

        if wait:
            late = (
                f"broker {target.broker_id} is no longer drained, but it is not in sync, or does not lead its "
                "partitions again, after"
            )
            until_done(look, timeout_s, late, every_s=DRAIN_LOOK_EVERY_S)
        else:
            look()
    print_done(
        f"broker {target.broker_id} is no longer drained; {counted(len(moved), 'leadership')} moved to it",
        {"broker_id": target.broker_id, "drained": False, "elected": list(map(str, sorted(moved)))},
        output,
    )


def _elect(admin: raftlog.Admin, partitions: list[TopicPartition]) -> None:
    by_topic: dict[str, list[int]] = {}
    for part in partitions:
        by_topic.setdefault(part.topic, []).append(part.partition)
    for topic, numbers in by_topic.items():
        with suppress(ElectionNotNeeded, PreferredLeaderNotAvailable):  # it has just changed: the next `look` sees it
            admin.elect_leaders(topic, numbers)


def _target(broker_id: int | None, this_one: bool, config: Path | None, bootstrap: str | None) -> Target | None:
    """Return the broker that the options name; None, after a note, if --config is of a node that is not a broker.

    Raises:
        typer.BadParameter: not exactly one of ID and --self is given, or --self and --config not together.
        InvalidConfig: the server would not start with that file.
    """
    if (broker_id is None) != this_one or (config is not None) != this_one:
        raise typer.BadParameter("name the broker by its ID, or by --self --config FILE")
    if broker_id is not None:
        return Target(broker_id, bootstrap or BOOTSTRAP_DEFAULT)
    node = ask_server_packages(_PRINT_IDENTITY, str(config))
    if not node["is_broker"]:
        print_note(f"node {node['node_id']} is a controller, not a broker: nothing to do")
        return None
    default_to(node["client"])
    addresses = [f"{_bracketed(_ANY_ADDRESS.get(host, host))}:{port}" for host, port in node["addresses"]]
    return Target(node["node_id"], bootstrap or ",".join(dict.fromkeys(addresses)))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
