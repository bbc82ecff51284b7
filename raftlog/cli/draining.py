"""`raftlog broker drain` and `undrain`: leaderships leave a broker before it stops, and come back afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

import raftlog
from raftlog._server_root import server_environment
from raftlog.cli import min_isr
from raftlog.cli.client_config import default_to
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BOOTSTRAP_VARIABLE,
    Output,
    OutputOption,
    counted,
    print_done,
    print_note,
)
from raftlog.cli.safe_stop import NeededPartition, astray, leaderships, named, needed
from raftlog.cli.waiting import seconds, until_done
from raftlog.errors import (
    ElectionNotNeeded,
    InvalidConfig,
    PreferredLeaderNotAvailable,
    RequestTimedOut,
    UnsupportedVersion,
)
from raftlog.types import TopicPartition

LOOK_EVERY_S: Final = 0.25
_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SAY_WHO_I_AM = """\
import json, os, sys
from pathlib import Path
from broker.config import BrokerConfig
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
    bool, typer.Option("--self", metavar="", help="The broker whose configuration --config names, in place of ID.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", dir_okay=False, exists=True, help="The server's TOML file, for --self."),
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Come back when it is done, or at once.")]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", parser=seconds, help="How long to wait; then exit code 1."),
]
BootstrapOption = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=BOOTSTRAP_VARIABLE,
        metavar="HOST:PORT,...",
        show_default=BOOTSTRAP_DEFAULT,
        help="Where the cluster is; with --self the broker itself is asked.",
    ),
]


class Target(NamedTuple):
    """Which broker is meant, and where the cluster is."""

    broker_id: int
    bootstrap: str


def drain(
    broker_id: IdArgument = None,
    this_one: SelfOption = False,
    config: ConfigOption = None,
    until_restart: Annotated[
        bool,
        typer.Option("--until-restart", metavar="", help="It is over when the broker starts again; no undrain then."),
    ] = False,
    wait: WaitOption = True,
    timeout_s: TimeoutOption = 60.0,
    bootstrap: BootstrapOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Take all leaderships from a broker, and give it no new replicas; then it may be stopped, and nobody notices.

    It keeps its replicas and stays in sync. This waits until others lead, and until no partition falls below
    min.insync.replicas when the broker stops. A partition that no other replica can lead stays with it, which a note
    names. After the time is up the broker stays drained. It stays so when it is started again, until it is undrained.

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
            f"note: {counted(len(staying), 'partition has', 'partitions have')} no other replica that could lead, and "
            f"cannot be used while the broker is stopped: {named(staying)}"
        )
    message = f"broker {target.broker_id} is {'' if drained else 'not '}drained"
    if wait:
        message += f": no partition falls below {min_isr.KEY} when it stops"
        if drained and not staying:
            message = f"{message}, and it leads nothing"
    result = {"broker_id": target.broker_id, "drained": drained, "staying": list(map(str, staying))}
    print_done(message, result, output)


def _await_drained(admin: raftlog.Admin, broker_id: int, timeout_s: float, *, drained: bool) -> list[TopicPartition]:
    """Return once the broker may stop, with what it still leads because nobody else can."""
    least = min_isr.known(admin)
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
        until_done(look, timeout_s, f"broker {broker_id} is {state} after", every_s=LOOK_EVERY_S)
    except RequestTimedOut as error:
        if not drained:
            raise
        first = "start what is out of sync; " if waits else ""
        raise RequestTimedOut(f"{error}; {first}raftlog broker undrain {broker_id} takes it back") from None
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
    """Let a broker lead again, and have replicas; the partitions that prefer it come back to it.

    This waits until they have; each has to be in sync there first. When the time is up the broker is not drained any
    more all the same, and the controller moves the rest later (auto.leader.rebalance.enable).

    Example: raftlog broker undrain 2
    """
    target = _target(broker_id, this_one, config, bootstrap)
    if target is None:
        return
    moved: set[TopicPartition] = set()
    with connect_admin(target.bootstrap) as admin:
        admin.alter_broker(target.broker_id, drained=False)

        def look() -> str:
            away = astray(admin.describe_topics(None, internal=True), target.broker_id)
            moved.update(each.partition for each in away if each.ready)
            _elect(admin, [each.partition for each in away if each.ready])
            if not away:
                return ""
            waits = [each.partition for each in away]
            return f"{counted(len(waits), 'leadership')} to come back: {named(waits)}"

        if wait:
            late = f"broker {target.broker_id} is not drained any more, but does not lead all after"
            until_done(look, timeout_s, late, every_s=LOOK_EVERY_S)
        else:
            look()
    print_done(
        f"broker {target.broker_id} is not drained any more; {counted(len(moved), 'leadership')} moved to it",
        {"broker_id": target.broker_id, "drained": False, "elected": list(map(str, sorted(moved)))},
        output,
    )


def _elect(admin: raftlog.Admin, partitions: list[TopicPartition]) -> None:
    by_topic: dict[str, list[int]] = {}
    for part in partitions:
        by_topic.setdefault(part.topic, []).append(part.partition)
    for topic, numbers in by_topic.items():
        with suppress(ElectionNotNeeded, PreferredLeaderNotAvailable):  # it has just changed: the next look sees it
            admin.elect_leaders(topic, numbers)


# Which broker


def _target(broker_id: int | None, this_one: bool, config: Path | None, bootstrap: str | None) -> Target | None:
    """Return which broker is meant; None for a node that is no broker, which a note says.

    Raises:
        typer.BadParameter: ID or --self, one of the two; --config goes with --self.
        InvalidConfig: the server would not start with that file.
    """
    if (broker_id is None) != this_one or (config is not None) != this_one:
        raise typer.BadParameter("name the broker by its ID, or by --self --config FILE")
    if broker_id is not None:
        return Target(broker_id, bootstrap or BOOTSTRAP_DEFAULT)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SAY_WHO_I_AM, str(config)],
        env=server_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise InvalidConfig(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"cannot read {config}")
    node = json.loads(done.stdout)
    if not node["is_broker"]:
        print_note(f"node {node['node_id']} is a controller and no broker: there is nothing to do")
        return None
    default_to(node["client"])
    addresses = [f"{_bracketed(_ANY_ADDRESS.get(host, host))}:{port}" for host, port in node["addresses"]]
    return Target(node["node_id"], bootstrap or ",".join(dict.fromkeys(addresses)))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
