"""What editors and type checkers know of the clients' arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SNIPPET = """
from typing import Unpack
import raftlog
from raftlog import Admin, Consumer, Producer, StagedWriter, aio
from raftlog.testing import Cluster

def billing(**options: Unpack[raftlog.ProducerKeywords]) -> Producer:
    return Producer("a:1", acks=1, **options)

Producer("a:1", acks="all", linger_ms=5, batch_size="64KiB", compression_type="zstd", client_id=None)
Producer({"bootstrap.servers": "a:1"}), Producer(bootstrap_servers=["a:1"], configs={"linger.ms": 5})
Consumer("a:1", "group", auto_offset_reset="earliest", security_protocol="SASL_SSL", max_poll_records=10)
Admin("a:1", default_api_timeout_ms="5s"), StagedWriter("a:1", "sink", acks="all")
aio.Producer("a:1", linger_ms=0.5), aio.Consumer("a:1", isolation_level="read_committed")
Cluster(3, log_segment_bytes="1MiB", auto_create_topics_enable=True)

def as_text(number: int) -> bytes:
    return b"%d" % number

def read(plain: Consumer, record: raftlog.Record) -> None:
    Producer("a:1").send("t", b"value", b"key").result()
    Producer("a:1", value_serializer=as_text).send("t", 5, b"key").result()
    Consumer("a:1", value_deserializer=int).poll()[0].value or 0 + 1
    (record.value or b"") + (plain.poll()[0].key or b"")
    Producer("a:1").send("t", "text")  # error: arg-type
    Producer("a:1", value_serializer=as_text).send("t", b"5")  # error: arg-type
    Consumer("a:1", value_deserializer=int).poll()[0].value.decode()  # error: union-attr

Producer("a:1", linger=5)  # error: call-arg
Producer("a:1", compression_type="zst")  # error: arg-type
Producer("a:1", enable_idempotence="no")  # error: arg-type
Producer("a:1", acks=2)  # error: arg-type
Consumer("a:1", linger_ms=5)  # error: call-arg
Consumer("a:1", auto_offset_reset="begin")  # error: arg-type
Admin("a:1", defaul_api_timeout_ms=5)  # error: call-arg
StagedWriter("a:1", "sink", transactional_id="t")  # error: call-arg
aio.Consumer("a:1", group="billing")  # error: call-arg
Cluster(log_segment_byte=5)  # error: call-arg
"""


def test_mypy_takes_right_options_and_refuses_wrong_ones(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = ["--strict", "--follow-imports=silent", "--ignore-missing-imports", f"--cache-dir={tmp_path / 'cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", *command, str(tmp_path / "snippet.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {int(line): kind for line, kind in re.findall(r"snippet.py:(\d+): error: .*\[([\w-]+)\]", done.stdout)}
    lines = enumerate(SNIPPET.splitlines(), 1)
    assert found == {number: line.split("# error: ")[1] for number, line in lines if "# error: " in line}, done.stdout
