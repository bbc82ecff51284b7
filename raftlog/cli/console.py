"""`raftlog console`: serves the web page for looking at a cluster and changing it; `raftlog up` starts it too."""

from __future__ import annotations

from collections.abc import Mapping
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
    certificate_logins: Annotated[
        bool,
        typer.Option(
            "--certificate-logins",
            metavar="",
            help="People log in with their own certificates; for brokers with security.protocol=ssl.",
        ),
    ] = False,
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
            help="A proxy before the console, such as an ingress, ends https: mark cookies as for https only.",
        ),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
) -> None:
    """Serve a web page for looking at the cluster and changing it, until Ctrl-C.

    On a cluster with users (security.protocol=sasl_ssl in --client-config) people log in with their own name and
    password, and may do what their ACLs allow. With security.protocol=ssl and --certificate-logins they log in with
    their certificate and its private key, which the console keeps in memory until their session ends. If
    --client-config has a user or a certificate, the console acts as that user for everyone who opens the page.

    Example: raftlog console

    Example: raftlog console --bootstrap broker-1:9092 --client-config tls.toml --read-only
    """
    if (package := missing_from("console")) is not None:
        raise InvalidConfig(needs("the console", package, "console"))
    from raftlog.console.__main__ import become  # here: it imports a web server
    from raftlog.console.app import LOOPBACK, Settings

    if (tls_certificate is None) != (tls_key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key belong together")
    client = settings_for(ADMIN_KEYS)
    with_login = certificate_logins or _names_nobody(client)
    # People bring the rest of it; an error in what there is shows now, and not at the first login.
    options = AdminOptions.make({**client, **(_SOMEBODY if _names_nobody(client) else {})}, {})
    if certificate_logins and (options.security_protocol != "ssl" or options.pem is None or options.pem.certificate):
        raise typer.BadParameter(
            "--certificate-logins needs a --client-config with security.protocol=ssl and without "
            "ssl.certificate.location: each person brings a certificate of their own"
        )
    tls = tls_certificate is not None
    https = tls or behind_https
    loopback = host in LOOPBACK or host.startswith("127.")
    if certificate_logins and not (loopback or https):
        raise typer.BadParameter(
            f"at {host} private keys would cross the network in the clear: --certificate-logins needs https "
            "(--tls-certificate and --tls-key, or --behind-https)"
        )
    if not loopback and not insecure and not (https and with_login):
        needed = {
            "https (--tls-certificate and --tls-key, or --behind-https)": https,
            "users to log in": with_login,
        }
        missing_for = " and ".join(name for name, has in needed.items() if not has)
        raise typer.BadParameter(
            f"at {host} everyone in the network can reach the console: it needs {missing_for}, or --insecure"
        )
    names = (*(LOOPBACK if loopback else (host,)), *(allowed_host or ()))
    settings = Settings(
        bootstrap=bootstrap,
        client=client,
        with_login=with_login,
        certificates=certificate_logins,
        acts_as="" if with_login else _user_of(options),
        read_only=read_only,
        session_timeout_s=session_timeout,
        hosts=() if host in ("0.0.0.0", "::") and not allowed_host else names,
        tls=https,
    )
    become(settings, host, port, str(tls_certificate) if tls else None, str(tls_key) if tls else None)


_SOMEBODY = {"sasl.username": "somebody", "sasl.password": "something"}


def _names_nobody(client: Mapping[str, object]) -> bool:
    """Whether brokers want a login with a password, and the config has no user."""
    given = {key.replace("_", "."): value for key, value in client.items()}
    by_password = str(given.get("sasl.mechanism")) != "OAUTHBEARER"
    return given.get("security.protocol") == "sasl_ssl" and by_password and not given.get("sasl.username")


def _user_of(options: AdminOptions) -> str:
    """Return the user that the config names, in words; empty: none."""
    if options.sasl_username:
        return options.sasl_username
    if options.sasl is not None:
        return "the user of its token"
    if options.pem is not None and options.pem.certificate:
        return f"certificate {Path(options.pem.certificate).name}"
    return ""
