"""`raftlog console`: serves the page where people look at their cluster; `raftlog up` starts it too. docs/console.md"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from raftlog._client.options import ADMIN_KEYS, AdminOptions
from raftlog._installed import missing_from, needs
from raftlog.cli.client_config import settings_for
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption
from raftlog.cli.servers import CONSOLE_PORT
from raftlog.errors import InvalidConfig


def console(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 picks a free one.")] = CONSOLE_PORT,
    read_only: Annotated[
        bool, typer.Option("--read-only", metavar="", help="Offer no changes, and refuse them.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="A name under which browsers may open the console, such as the name in an ingress; may be repeated.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="PEM file with the certificate for https.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="PEM file with its private key.")
    ] = None,
    session_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=60, help="A session without a click ends after this time.")
    ] = 1800.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            metavar="",
            help="Allow an address beyond loopback without https, for example behind an ingress, or without logins.",
        ),
    ] = False,
    behind_https: Annotated[
        bool,
        typer.Option(
            "--behind-https",
            metavar="",
            help="Browsers come over https that ends before the console, as at an ingress: cookies are for https only.",
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
) -> None:
    """Serve a page where people look at the cluster and change it, until Ctrl-C.

    On a cluster with users (security.protocol=sasl_ssl in --client-config) people log in with a name and a password of
    theirs, and may do what their ACLs allow. With a user or a certificate in --client-config, the console acts as that
    one for everybody who opens it.

    Example: raftlog console

    Example: raftlog console --bootstrap broker-1:9092 --client-config tls.toml --read-only
    """
    if (package := missing_from("console")) is not None:
        raise InvalidConfig(needs("the console", package, "console"))
    from raftlog.console.app import LOOPBACK, Server, Settings, keep_memory_small  # here: it imports a web server

    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key belong together")
    client = settings_for(ADMIN_KEYS)
    options = AdminOptions.make({**client, "sasl.username": client.get("sasl.username", "")}, {})
    with_login = options.security_protocol == "sasl_ssl" and not options.sasl_username
    tls = tls_certificate is not None
    https = tls or behind_https
    loopback = host in LOOPBACK or host.startswith("127.")
    if not loopback and not insecure and not (https and with_login):
        needed = {
            "https (--tls-certificate and --tls-key, or --behind-https)": https,
            "users to log in": with_login,
        }
        missing_for = " and ".join(name for name, has in needed.items() if not has)
        raise typer.BadParameter(
            f"at {host} everybody in the network reaches the console: it needs {missing_for}, or --insecure"
        )
    names = (*(LOOPBACK if loopback else (host,)), *(allowed_host or ()))
    settings = Settings(
        bootstrap=bootstrap,
        client=client,
        with_login=with_login,
        read_only=read_only,
        session_timeout_s=session_timeout,
        hosts=() if host in ("0.0.0.0", "::") and not allowed_host else names,
        tls=https,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("raftlog.console.audit").setLevel(logging.INFO)
    server = Server(settings, host, port, str(tls_certificate) if tls else None, str(tls_key) if tls else None)
    server.announce = lambda url: print(f"the console is at {url}; Ctrl-C stops it", flush=True)
    keep_memory_small()
    server.run()
    if not server.started:
        raise typer.Exit(1)
