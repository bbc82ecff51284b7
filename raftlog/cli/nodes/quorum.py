"""`raftlog quorum ...`: procedures on the metadata directories of stopped controllers."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from raftlog._installed import server_environment
from raftlog.cli.client_config import connect_admin
from raftlog.cli.nodes.cluster import print_quorum
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, Output, OutputOption, print_error, print_json
from raftlog.cli.servers import ask_server_packages

app = typer.Typer(
    no_args_is_help=True,
    help="Set up a metadata quorum, describe it, and replace its voters. All but new-id and describe work on the "
    "metadata directory of a stopped controller.",
)

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The configuration file of the controller.",
    ),
]
_READ_CONFIG = """\
import json, os, sys
from pathlib import Path
from broker.config.config import BrokerConfig
from raftlog.errors import InvalidConfig
flags = {"cluster.id": sys.argv[2]} if sys.argv[2:] else {}
try:
    config = BrokerConfig.load(file=Path(sys.argv[1]), environment=os.environ, flags=flags)
except InvalidConfig as error:
    sys.exit(str(error))
print(json.dumps({"node_id": config.node_id, "cluster_id": config.cluster_id, "directory": config.metadata_log_dir,
    "voters": ",".join(map(str, config.controller_quorum_voters or [config.node_id]))}))
"""


@app.command("new-id")
def new_id() -> None:
    """Generate an id for a new cluster: the value of cluster.id on all of its nodes.

    Example: raftlog quorum new-id
    """
    print(uuid.uuid4())


@app.command("format")
def format_(
    config: ConfigOption,
    new_quorum: Annotated[
        bool,
        typer.Option("--new-quorum", metavar="", help="All voters are new and have no data, so they may vote at once."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Prepare the metadata directory of a new controller. A server does this itself at its first start if it is safe.

    Example: raftlog quorum format --config server.toml
    """
    found = _read(config)
    arguments = ["--node-id", str(found["node_id"]), "--cluster-id", found["cluster_id"], "--voters", found["voters"]]
    _run("format", found["directory"], output, *arguments, *(["--new-quorum"] if new_quorum else []))


@app.command()
def describe(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Read the directory of this stopped controller instead of asking the cluster.",
        ),
    ] = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the metadata quorum, or with --config the state on the disk of a stopped controller.

    Example: raftlog quorum describe --config server.toml
    """
    if config is not None:
        _run("describe", _directory(config), output)
        return
    with connect_admin(bootstrap) as admin:
        print_quorum(admin.describe_quorum(), output)


@app.command("set-voters")
def set_voters(
    config: ConfigOption,
    voters: Annotated[str, typer.Option(metavar="ID,...", help="The node ids of all voters from now on.")],
    copies: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="From one voter to several: write a copy of its data for each new voter into DIR."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", metavar="", help="Do it even if committed changes may be lost; see docs/quorum.md."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change the list of voters in the directory of a stopped controller; do the same on every remaining voter.

    Example: raftlog quorum set-voters --config server.toml --voters 1,2,4
    """
    arguments = ["--voters", voters]
    if copies is not None:
        arguments += ["--copies", str(copies)]
    if force:
        arguments.append("--force")
    _run("set-voters", _directory(config), output, *arguments)


def _read(config: Path, *cluster_id: str) -> dict[str, Any]:
    """Return directory, node_id, cluster_id and voters as the server reads them from the file and the environment.

    `cluster_id` replaces the configured one.
    """
    found: dict[str, Any] = ask_server_packages(_READ_CONFIG, str(config), *cluster_id)
    return found


def _directory(config: Path) -> str:
    """Return the metadata directory. `cluster.id` may still be missing: `describe` shows it to the operator."""
    directory: str = _read(config, "the directory has it")["directory"]
    return directory


def _run(command: str, directory: str, output: Output, *arguments: str) -> None:
    line = [sys.executable, "-P", "-m", "raftmeta.offline", command, "--metadata-dir", directory, *arguments]
    if output is Output.JSON:
        line.append("--json")
    done = subprocess.run(line, env=server_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        print_error(done.stderr.strip().removeprefix("error: "))
        raise typer.Exit(done.returncode)
    if output is Output.JSON:
        print_json(json.loads(done.stdout))
    else:
        print(done.stdout, end="")
