"""`raftlog quota ...`: limits on what users, client ids and addresses use (KIP-13, KIP-124, KIP-546, KIP-599, KIP-612).

Options that name an entity are those of kafka-configs.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from raftlog.cli.client_config import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    Row,
    key_value_pairs,
    print_done,
    print_note,
    print_rows,
)
from raftlog.errors import ResourceNotFound
from raftlog.security import QuotaEntity, quota_levels

app = typer.Typer(no_args_is_help=True, help="Set, show and remove limits on what clients may use.")

WHOLE_PERCENT: Final = 100
CLIENT_KEYS: Final = ("producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate")
DEFAULT: Final = "<default>"
COLUMNS: Final = ("user", "client_id", "ip", "quota", "value")

UserOption = Annotated[
    str | None, typer.Option("--user", metavar="NAME", show_default=False, help="The user, without User: before it.")
]
UserDefaultsOption = Annotated[
    bool, typer.Option("--user-defaults", metavar="", help="All users without a quota of their own.")
]
ClientOption = Annotated[str | None, typer.Option("--client", metavar="ID", show_default=False, help="The client id.")]
ClientDefaultsOption = Annotated[
    bool, typer.Option("--client-defaults", metavar="", help="All client ids without a quota of their own.")
]
IpOption = Annotated[str | None, typer.Option("--ip", metavar="ADDRESS", show_default=False, help="The address.")]
IpDefaultsOption = Annotated[
    bool, typer.Option("--ip-defaults", metavar="", help="All addresses without a quota of their own.")
]


@app.command("set")
def set_quotas(
    quotas: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            show_default=False,
            help="Of users and client ids: producer_byte_rate, consumer_byte_rate (bytes a second), request_percentage "
            "(of a broker's time), controller_mutation_rate (a second). Of addresses: connection_creation_rate.",
        ),
    ],
    user: UserOption = None,
    user_defaults: UserDefaultsOption = False,
    client: ClientOption = None,
    client_defaults: ClientDefaultsOption = False,
    ip: IpOption = None,
    ip_defaults: IpDefaultsOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Check the request on the brokers, and change nothing.")
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set quotas of a user, a client id, both together, or an address. Each broker allows this rate by itself.

    Example: raftlog quota set --user orders producer_byte_rate=1000000 consumer_byte_rate=2000000

    Example: raftlog quota set --user-defaults request_percentage=20
    """
    entity = entity_of(user, user_defaults, client, client_defaults, ip, ip_defaults)
    values = {key: _number(key, value) for key, value in key_value_pairs(quotas).items()}
    with connect_admin(bootstrap) as admin:
        admin.alter_client_quotas({entity: dict(values)}, validate_only=dry_run)
    if values.get("request_percentage", 0) > WHOLE_PERCENT:
        print_note("note: request_percentage is of one event loop's time, so a value above 100 limits nothing")
    done = "would be set" if dry_run else "set"
    print_done(f"{', '.join(values)} of {named(entity)} {done}", {**_names(entity), "quotas": values}, output)


@app.command("list")
def list_quotas(
    user: UserOption = None,
    user_defaults: UserDefaultsOption = False,
    client: ClientOption = None,
    client_defaults: ClientDefaultsOption = False,
    ip: IpOption = None,
    ip_defaults: IpDefaultsOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the quotas that are set; with options, only those of entities that have these names.

    Example: raftlog quota list --user orders
    """
    wanted = entity_of(user, user_defaults, client, client_defaults, ip, ip_defaults, needed=False)
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)  # the next answers include every acknowledged change
        found = admin.describe_client_quotas(wanted)
    rows: list[Row] = [
        {**_names(entity), "quota": key, "value": value}
        for entity, values in found.items()
        for key, value in values.items()
    ]
    print_rows(rows, COLUMNS, output, optional=("user", "client_id", "ip"))


@app.command()
def describe(
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="The user, without User: before it.")
    ] = "ANONYMOUS",
    client: Annotated[str, typer.Option("--client", metavar="ID", show_default=False, help="The client id.")] = "",
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the quotas that limit a user at a client id, and the entity that each belongs to.

    A quota of the user at this client id comes first, then the defaults, then quotas of the client id alone.

    Example: raftlog quota describe --user orders --client web-1
    """
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        known = admin.describe_client_quotas()
    rows: list[Row] = []
    for key in CLIENT_KEYS:
        giving = next((each for each in quota_levels(user, client) if key in known.get(each, {})), None)
        value = None if giving is None else known[giving][key]
        rows.append({"quota": key, "value": value, "from": "" if giving is None else named(giving)})
    print_rows(rows, ("quota", "value", "from"), output)


@app.command()
def remove(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", show_default=False, help="By default all of the entity's.")
    ] = None,
    user: UserOption = None,
    user_defaults: UserDefaultsOption = False,
    client: ClientOption = None,
    client_defaults: ClientDefaultsOption = False,
    ip: IpOption = None,
    ip_defaults: IpDefaultsOption = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove quotas. Throttled clients go on within a second.

    Example: raftlog quota remove --user orders producer_byte_rate
    """
    entity = entity_of(user, user_defaults, client, client_defaults, ip, ip_defaults)
    with connect_admin(bootstrap) as admin:
        admin.describe_cluster(linearizable=True)
        present = admin.describe_client_quotas(entity, strict=True).get(entity, {})
        chosen = list(dict.fromkeys(keys or present))
        missing = [key for key in chosen if key not in present]
        if missing or not chosen:
            what = f"quota {missing[0]!r}" if missing else "quota"
            raise ResourceNotFound(f"{named(entity)} has no {what}; raftlog quota list shows those that were set")
        admin.alter_client_quotas({entity: dict.fromkeys(chosen)})
    print_done(f"{', '.join(chosen)} of {named(entity)} removed", {**_names(entity), "removed": chosen}, output)


def entity_of(
    user: str | None,
    user_defaults: bool,
    client: str | None,
    client_defaults: bool,
    ip: str | None,
    ip_defaults: bool,
    *,
    needed: bool = True,
) -> QuotaEntity:
    """Return the entity that the options name.

    Raises:
        typer.BadParameter: they name none although one is `needed`, or contradict each other.
    """
    names: list[str | None] = []
    for option, name, is_default in (
        ("user", user, user_defaults),
        ("client", client, client_defaults),
        ("ip", ip, ip_defaults),
    ):
        if name is not None and is_default:
            raise typer.BadParameter(f"give --{option} or --{option}-defaults, not both")
        if name == "":
            raise typer.BadParameter(
                f"--{option} is empty; --{option}-defaults is for all that have no quota of their own"
            )
        names.append("" if is_default else name)
    entity = QuotaEntity(*names)
    if needed and entity == QuotaEntity():
        raise typer.BadParameter("name the quota's entity: --user, --client, both, or --ip; or their --...-defaults")
    return entity


def named(entity: QuotaEntity) -> str:
    """Return an entity in words."""
    words = {"user": entity.user, "client id": entity.client_id, "address": entity.ip}
    return " at ".join(
        f"{word} {name}" if name else f"the default {word}" for word, name in words.items() if name is not None
    )


def _names(entity: QuotaEntity) -> Row:
    return {
        "user": DEFAULT if entity.user == "" else entity.user,
        "client_id": DEFAULT if entity.client_id == "" else entity.client_id,
        "ip": DEFAULT if entity.ip == "" else entity.ip,
    }


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{key}={text}: a quota is a number") from None
