"""What people write: the server's configuration, and the inputs and plans of the command line."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Final

from broker.config.config import BROKER_CONFIGS, BrokerConfig
from raftlog.cli.records import produce
from raftlog.cli.records.log_dump import check_segment, read_markers, read_records
from raftlog.cli.records.produce import Columns, Format
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.log_directories import base
from tests.fuzz.oracle import refusals, require
from tests.fuzz.repair import repair
from tests.fuzz.storages import damage
from tests.support.log_driver import LOG_DIR

_NAMES: Final = sorted(key.name for key in BROKER_CONFIGS)
_GOOD: Final = '"node.id" = 1\n"log.dirs" = "/data"\n"listeners" = "127.0.0.1:9092"\n[log]\nretention.ms = "7d"\n'
_VALUES: Final = (
    '"1"', "1", "-1", "0", '"7d"', '"1GiB"', '"-5ms"', "true", '"true"', "1.5", "nan", "inf", '""', "[]", '["a"]',
    '["1@127.0.0.1:9093"]', '"1@127.0.0.1:9093,2@127.0.0.1:9094,3@127.0.0.1:9095"', '"127.0.0.1:0"', '"[::1]:1"',
    "1979-05-27", '"²"', '"٣"', '"99999999999999999999999"', "9" * 400, "9" * 5_000, '"' + "9" * 5_000 + '"', "{a = 1}",
    '"broker,controller"', '"a@b:c"', '"1@h:99999999"', '"\\u0000"', "0x7fffffffffffffff", "1e999",
)  # fmt: skip
_DEEP: Final = 2_000


def server_target(data: bytes) -> None:
    """server.toml, variables and flags: a configuration, or a sentence about what is wrong."""
    choices = Choices(data)
    lines = [_GOOD]
    for _ in range(choices.below(5)):
        name = choices.pick(_NAMES) if choices.byte() % 8 else choices.text()
        value = choices.pick(_VALUES) if choices.byte() % 4 else json.dumps(choices.text())
        lines.append(f'"{name}" = {value}\n' if choices.one_in(2) else f"{name} = {value}\n")
    if choices.byte() % 16 == 15:
        lines.append(_deep(choices))
    if choices.one_in(3):
        lines.reverse()
    content = "".join(lines).encode("utf-8", "replace")
    content = mutate(content, choices) if choices.one_in(2) else content
    environment = {
        choices.pick(("RAFTLOG_NODE_ID", "RAFTLOG_LOG_DIRS", "RAFTLOG_X", "RAFTLOG_LISTENERS", "PATH")): choices.text()
        for _ in range(choices.below(3))
    }
    flags = {choices.pick(_NAMES): choices.text() for _ in range(choices.below(3))}
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        with refusals():
            config = BrokerConfig.load(file=Path(file.name), environment=environment, flags=flags)
            require(0 <= config.node_id < 1 << 31, f"the node id {config.node_id} was accepted")
            require(
                config.log_dirs and config.process_roles,
                "a configuration without a log directory or without a role was accepted",
            )
            require(0 <= config.listener[1] < 1 << 16, f"the port {config.listener[1]} was accepted")
            config.log_config()
            config.group_config()
            config.transaction_config()
            config.producer_limits()


def _deep(choices: Choices) -> str:
    """Return a value, or a key, that is nested very deep."""
    kind = choices.below(4)
    if kind == 0:
        return "a = " + "[" * _DEEP
    if kind == 1:
        return "a = " + "[" * _DEEP + "]" * _DEEP
    if kind == 2:
        return ".".join("a" * _DEEP) + " = 1\n"
    return "a = " + "{a = " * _DEEP


def input_target(data: bytes) -> None:
    """What `raftlog produce` reads, in every format: records with their places, or a refusal that names the line."""
    choices = Choices(data)
    source = choices.pick((Format.LINES, Format.JSON, Format.CSV, Format.PARQUET))
    columns = Columns(
        choices.pick((None, "a", "k")), choices.pick((None, "b", "v")), choices.pick((None, ":", "\t", "ab"))
    )
    content = _content(source, choices)
    rows = 0
    with refusals():
        for part in produce.read(io.BytesIO(content), source, columns):
            require(
                len(part.records) == len(part.numbers),
                f"{len(part.records)} records have {len(part.numbers)} line numbers",
            )
            rows += len(part.records)
            for index in range(min(len(part.records), 3)):
                part.place(index)
    require(rows <= len(content) + 100_000, f"{rows} rows were read from {len(content)} bytes")


def _content(source: Format, choices: Choices) -> bytes:
    if choices.one_in(8):
        return choices.rest()
    match source:
        case Format.JSON:
            content = b"\n".join(_json_line(choices) for _ in range(choices.below(5)))
        case Format.CSV:
            content = b'a,b,c\n1,"x\ny",3\n4,5,6\n' + choices.take(choices.below(30))
        case Format.PARQUET:  # torn, but not altered within: what Arrow makes of its own format is for Arrow to fuzz
            return _PARQUET[: choices.below(len(_PARQUET) + 1)] + choices.take(choices.below(9))
        case _:
            content = b"a:b\nk:v\n\nab\n" + choices.take(choices.below(30))
    return mutate(content, choices)


_JSON_NAMES: Final = ("key", "value", "key_base64", "value_base64", "headers", "partition", "timestamp", "x")
_JSON_VALUES: Final[tuple[object, ...]] = (
    None, "text", "aGk=", "not base64!", 5, -1, 1 << 40, 1 << 70, 1e400, True, [], {}, [["h", "v"]], {"h": "v"},
    [["h"]],
    [[1, 2]], {"h": None}, "\ud800", [[]], "x" * 1_000,
)  # fmt: skip


def _json_line(choices: Choices) -> bytes:
    kind = choices.byte() % 16
    if kind == 15:
        return choices.pick((b"[", b'{"value":[', b'{"value":{"a":')) * 50_000
    if kind == 14:
        return b'{"value": ' + b"9" * 6_000 + b"}"
    record = {choices.pick(_JSON_NAMES): choices.pick(_JSON_VALUES) for _ in range(choices.below(5))}
    return json.dumps(record).encode("utf-8", "replace")


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table({"a": ["1", "2", None], "b": [b"x", None, b"y"], "c": [1.5, 2.5, 3.5]}), out)
    return out.getvalue()


_PARQUET: Final = _parquet()


def segment_target(data: bytes) -> None:
    """`raftlog log dump` on damaged files: a report, with a sentence about each thing that is wrong."""
    choices = Choices(data)
    whole = {
        path: content
        for path, content in base(choices.one_in(2), choices.one_in(2)).files.items()
        if path.startswith(f"{LOG_DIR}/first-0/") and path.endswith((".log", "index"))
    }
    done = damage(whole, choices, repair if choices.one_in(2) else None)
    with tempfile.TemporaryDirectory(prefix="raftlog-fuzz-") as directory:
        for path, content in done.files.items():
            (Path(directory) / path.rpartition("/")[2]).write_bytes(content)
        for file in sorted(Path(directory).glob("*.log")):
            with refusals():
                report = check_segment(file)
                require(
                    sum(end - start for start, end in report.unread) <= report.size_bytes,
                    "the check has left out more bytes than the segment has",
                )
                for batch in report.batches[:5]:
                    if batch.problem is None:
                        (read_markers if batch.header.is_control else read_records)(file, batch.position)
            unchanged = whole.get(f"{LOG_DIR}/first-0/{file.name}") == file.read_bytes()
            if unchanged and not any(file.stem in name for name in done.touched):
                require(not report.problems, f"an undamaged segment is reported as damaged: {report.problems}")
