"""docs/security.md, "From nothing, on one machine": its lines, as a reader types them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from raftlog.testing.layout import free_ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
WAIT_S = 300.0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page makes certificates with openssl")
def test_a_secured_server_from_nothing(tmp_path: Path) -> None:
    _, _, section = PAGE.read_text().partition("## From nothing, on one machine\n")
    _, lines, *_ = re.split(r"```(?:sh)?\n", section)
    (port,) = free_ports(1)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAFTLOG_")}
    shell = subprocess.Popen(
        ["bash", "-e", "-c", lines.replace(":9092", f":{port}")],
        cwd=tmp_path,
        env=environment
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAFTLOG_BOOTSTRAP": f"127.0.0.1:{port}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        output, errors = shell.communicate(timeout=WAIT_S)
    finally:
        with suppress(ProcessLookupError):  # the server, if the lines have not come to their end
            os.killpg(shell.pid, signal.SIGKILL)
    log = (tmp_path / "secure" / "server.log").read_text()
    assert shell.returncode == 0, f"{errors}\n{log[-3000:]}"
    assert output.splitlines() == [
        "topic events created",
        "user orders created",
        "added: User:orders may Read topic events",
        "added: User:orders may Write topic events",
        "hello",
        "refused, as it should be",
    ]
    assert "User:orders" in errors.splitlines()[-1]
    assert "raftlog acl add" in errors.splitlines()[-1], "the refusal must name the command that would allow it"
