"""The Python in docs/recipes.md runs as it stands there, block after block, against a real broker."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raftlog import Admin
from raftlog.testing import Cluster
from tests.support.patient_polls import patient_polls
from tests.support.steady import STEADY

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
_ALL = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
FILES = {match[1]: block for block in _ALL if (match := re.match(r"# (\S+\.py)\n", block))}
BLOCKS = [block for block in _ALL if block not in FILES.values()]
SOON, LATER = 'b"try again", delay=0.5', 'b"try again", delay=10'
"""It is seen that a record is not due yet, however long the next queue takes to open."""


@pytest.mark.filterwarnings("error")
def test_the_recipes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "recipes"}
    with Cluster(nodes=1, config=STEADY) as cluster, patient_polls(monkeypatch, cluster.bootstrap, gathering=False):
        with Admin(cluster.bootstrap) as admin:
            for topic in ("hits", "clicks"):
                admin.create_topic(topic)
        assert "127.0.0.1:9092" in BLOCKS[0]
        assert sum(block.count(SOON) for block in BLOCKS) == 1
        for number, block in enumerate(BLOCKS):
            code = block.replace("127.0.0.1:9092", cluster.bootstrap).replace(SOON, LATER)
            exec(compile(code, f"{RECIPES.name}, block {number + 1}", "exec"), names)
        names["database"].close()
        assert asyncio.run(post(names["app"], "/clicks/ada", b"buy")) == (200, b'{"partition":0,"offset":0}')
        assert served_by_gunicorn(tmp_path, cluster.bootstrap, "/start") == b"offset 0\n"
    assert capsys.readouterr().out.splitlines() == [
        "3 accounts in order",
        "4 6 0 applied, 45 cents",
        "20 done, 20 shouted, 20 of them different",
        "True there is a backlog",
        "6000 jobs, [1, 1, 1, 1] partitions each",
        "[] is due at once",
        "b'order-7' b'try again' attempt 1",
        "[b'your table is booked']",
        """b'unknown account' b"ValueError('there is no such account')\"""",
        "True all is committed",
        "[('ada', 4), ('bob', 4), ('eve', 4)]",
        "[('ada', 1), ('bob', 1), ('eve', 1)]",
    ]


async def post(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Send one request to an ASGI application, within its lifespan; return the status and the body of the answer."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    async with app.router.lifespan_context(app):
        await app({**scope, "headers": [], "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def served_by_gunicorn(directory: Path, bootstrap: str, path: str) -> bytes:
    """Run the files of the recipe, ask them for a path, and return the answer's body."""
    for name, block in FILES.items():
        (directory / name).write_text(block.replace("127.0.0.1:9092", bootstrap))
    address = directory / "socket"
    command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"unix:{address}", "hits:application"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(str(address))
                except OSError:
                    assert process.poll() is None, (directory / "log").read_text()
                    assert time.monotonic() < deadline_s, (directory / "log").read_text()
                    time.sleep(0.02)
                    continue
                connection.settimeout(60)
                connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(65_536), b""))
            break
        process.terminate()
        assert process.wait(60) == 0, (directory / "log").read_text()
        return answer.partition(b"\r\n\r\n")[2]
    finally:
        process.kill()
        process.wait()
