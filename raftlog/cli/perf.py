"""`raftlog perf ...`: measures the speed of a cluster, as Kafka's *-perf-test tools do.

produce      kafka-producer-perf-test: records per second, and the time from send to acknowledgement
consume      kafka-consumer-perf-test: records per second from the beginning of a topic to its present end
end-to-end   kafka-e2e-latency: one record at a time, from send until a consumer has it

Each run ends by itself, after a number of records or `--seconds`. Its result is one row; its progress is on stderr.
"""

from __future__ import annotations

import random
import string
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

import raftlog
from raftlog._core.words import counted
from raftlog.cli.client_config import connect_admin, connect_consumer, connect_producer
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    key_value_pairs,
    print_note,
    print_rows,
)
from raftlog.cli.records.produce import Acks, Compression, CompressionOption, check_settings
from raftlog.errors import InvalidRequestError, RequestTimedOut, TopicAlreadyExists

_MIB: Final = 1 << 20
_TELL_EVERY_S: Final = 5.0
_SAMPLES: Final = 50_000
"""How many latencies of a run are measured at most: a callback for each record would slow the producer down."""
_FLUSH_S: Final = 60.0
_INTERRUPTED_FLUSH_S: Final = 5.0
_ARRIVAL_S: Final = 30.0
"""How long one record may take from end to end."""
_POLL_S: Final = 0.2
_PAYLOADS: Final = 64
"""Different values that are sent in turn, so that compression does not see one text again and again."""
_LATENCIES: Final = ("mean_ms", "p50_ms", "p95_ms", "p99_ms", "p999_ms", "max_ms")
_RATES: Final = ("records", "seconds", "records_per_second", "mib_per_second")

app = typer.Typer(
    no_args_is_help=True,
    help="Measure how fast a cluster is: producing, consuming, and from end to end. Each run ends by itself.",
)

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
RecordsOption = Annotated[int, typer.Option("--records", "-n", min=1, help="Stop after this number of records.")]
SecondsOption = Annotated[float, typer.Option(min=0.1, help="Stop after this time.")]
SizeOption = Annotated[int, typer.Option(min=8, metavar="BYTES", help="Bytes of each value.")]
AcksOption = Annotated[
    Acks, typer.Option(help="all: wait until all in-sync replicas have it; 1: the leader; 0: do not wait.")
]
ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="Any setting of this client; may be repeated."),
]
CreateOption = Annotated[
    bool, typer.Option("--create", metavar="", help="Create the topic if there is none; it is not deleted afterwards.")
]
PartitionsOption = Annotated[
    int | None, typer.Option("--partitions", min=1, help="With --create: partitions, by default the server's number.")
]
ReplicationOption = Annotated[
    int | None, typer.Option("--replication-factor", min=1, help="With --create: replicas, by default the server's.")
]


class Reading(StrEnum):
    """The values of `perf consume --as`."""

    RECORDS = "records"
    ARROW = "arrow"


def latencies(times_s: Sequence[float]) -> dict[str, float | None]:
    """Return mean, percentiles and maximum in milliseconds; None without a measurement."""
    if not times_s:
        return dict.fromkeys(_LATENCIES)
    ordered = sorted(times_s)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95, 0.99, 0.999, 1.0)]
    return {
        name: round(each * 1000, 2) for name, each in zip(_LATENCIES, (sum(ordered) / len(ordered), *at), strict=True)
    }


def rates(records: int, data_bytes: int, seconds: float) -> dict[str, float]:
    """Return the number of records, the time, and both rates."""
    seconds = max(seconds, 1e-9)
    found = (records, round(seconds, 3), round(records / seconds, 1), round(data_bytes / _MIB / seconds, 3))
    return dict(zip(_RATES, found, strict=True))


def payloads(size_bytes: int, seed: int = 0) -> list[bytes]:
    """Return values of random capital letters, as kafka-producer-perf-test sends them."""
    letters = random.Random(seed).choices(string.ascii_uppercase.encode(), k=size_bytes * _PAYLOADS)
    return [bytes(letters[at : at + size_bytes]) for at in range(0, len(letters), size_bytes)]


class Paced:
    """Limits a loop to a number of turns a second; without a rate it never waits.

    A loop that is late catches up, so that a pause does not lower the rate of the whole run.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._began = clock()

    def wait(self, turn: int) -> None:
        """Wait until the turn, counted from 0, is due."""
        if self._rate is not None and (left := self._began + turn / self._rate - self._clock()) > 0:
            self._sleep(left)


class _Told:
    """Prints the rate and the latency of each period of some seconds."""

    def __init__(self, began: float) -> None:
        self._next = began + _TELL_EVERY_S
        self._last = (began, 0, 0)

    def look(self, now: float, records: int, data_bytes: int, times_s: Sequence[float]) -> None:
        """Print a line if it is time."""
        if now < self._next:
            return
        at, before, seen = self._last
        found = rates(records - before, int(data_bytes * (records - before) / max(1, records)), now - at)
        recent = latencies(times_s[seen:])
        waited = "" if recent["p99_ms"] is None else f", p50 {recent['p50_ms']} ms, p99 {recent['p99_ms']} ms"
        print_note(
            f"{counted(records, 'record')}; {found['records_per_second']:,.0f} a second "
            f"({found['mib_per_second']:.2f} MiB){waited}"
        )
        self._last, self._next = (now, records, len(times_s)), now + _TELL_EVERY_S


def _create(bootstrap: str, topic: str, create: bool, partitions: int | None, replication_factor: int | None) -> None:
    """Create the topic if that is asked for and there is none."""
    if not create:
        if partitions is not None or replication_factor is not None:
            raise typer.BadParameter("--partitions and --replication-factor are for --create")
        return
    with connect_admin(bootstrap) as admin, suppress(TopicAlreadyExists):
        admin.create_topic(topic, partitions, replication_factor)


def _settings(acks: Acks, more: Mapping[str, object], config: Sequence[str] | None) -> dict[str, str]:
    given = {key: str(value) for key, value in more.items() if value is not None}
    found = {"acks": acks.value, **given, **key_value_pairs(config or [])}
    check_settings(found)
    return found


def _show(topic: str, result: Mapping[str, Any], columns: Sequence[str], output: Output) -> None:
    row = {"topic": topic, **result}
    print_rows([row], ("topic", *columns), output, documents=row)


@app.command()
def produce(
    topic: TopicArgument,
    records: RecordsOption = 100_000,
    seconds: SecondsOption = 60.0,
    record_size: SizeOption = 1000,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Records a second; by default as many as possible.")
    ] = None,
    acks: AcksOption = Acks.ALL,
    batch_size: Annotated[str | None, typer.Option(metavar="SIZE", help="batch.size of the producer.")] = None,
    linger_ms: Annotated[str | None, typer.Option(metavar="MS", help="linger.ms of the producer.")] = None,
    compression: CompressionOption = Compression.NONE,
    config: ConfigOption = None,
    create: CreateOption = False,
    partitions: PartitionsOption = None,
    replication_factor: ReplicationOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send records to a topic as fast as possible, or at a rate, and print the rate and the latency.

    The latency is the time from send to acknowledgement. Without --rate, a record spends most of it in the producer's
    own queue. Exit code 1: a record was not acknowledged.

    Example: raftlog perf produce events --create --records 200000 --record-size 1000

    Example: raftlog perf produce events --rate 5000 --seconds 30 --acks 1 --output json
    """
    _create(bootstrap, topic, create, partitions, replication_factor)
    more = {"batch.size": batch_size, "linger.ms": linger_ms, "compression.type": compression.value}
    values = payloads(record_size)
    expected = records if rate is None else min(records, int(rate * seconds) + 1)
    step = max(1, expected // _SAMPLES)
    times_s = array("d")
    sent = 0
    with connect_producer(bootstrap, _settings(acks, more, config)) as producer:
        producer.send_batch(topic, [])  # sends nothing, but fails for an unknown topic
        began = now = time.perf_counter()
        paced, told = Paced(rate), _Told(began)
        with _until_interrupted() as interrupted:
            while sent < records and now - began < seconds:
                paced.wait(sent)
                delivery = producer.send(topic, values[sent % _PAYLOADS])
                if sent % step == 0:
                    now = time.perf_counter()
                    delivery.add_done_callback(_timer(now, times_s))
                    told.look(now, sent, sent * record_size, times_s)
                sent += 1
        flush_s = _INTERRUPTED_FLUSH_S if interrupted else _FLUSH_S
        try:
            producer.flush(flush_s)
        except TimeoutError:
            print_note(f"not all records were acknowledged within {flush_s:g} s after the last one")
            producer.close(timeout=0)
        took = time.perf_counter() - began
        counts = producer.metrics()["producer-metrics"]
    acknowledged = int(counts["record-send-total"])
    result = {
        **rates(acknowledged, acknowledged * record_size, took),
        **latencies(times_s),
        "failed": sent - acknowledged,
    }
    _show(topic, result, (*_RATES, *_LATENCIES, "failed"), output)
    if interrupted:
        raise KeyboardInterrupt
    if acknowledged < sent:
        raise typer.Exit(1)


@contextmanager
def _until_interrupted() -> Iterator[list[bool]]:
    """Let Ctrl-C end the block; the list has an entry if it did. The caller prints the results so far."""
    interrupted: list[bool] = []
    try:
        yield interrupted
    except KeyboardInterrupt:
        interrupted.append(True)


def _timer(began: float, times_s: array[float]) -> Callable[[raftlog.Delivery], None]:
    def done(delivery: raftlog.Delivery) -> None:
        times_s.append(time.perf_counter() - began)

    return done


@app.command()
def consume(
    topic: TopicArgument,
    records: RecordsOption = 1_000_000,
    seconds: SecondsOption = 60.0,
    reading: Annotated[
        Reading, typer.Option("--as", help="records: one by one, as poll returns them; arrow: as tables.")
    ] = Reading.RECORDS,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read a topic from its beginning to its present end, and print the rate.

    It commits nothing. The time begins with the first request; first_record_ms is the part before the first record.

    Example: raftlog perf consume events --records 500000 --as arrow
    """
    settings = key_value_pairs(config or [])
    with connect_consumer(bootstrap, "earliest", settings=settings) as consumer:
        parts = consumer.partitions_for(topic)
        starts, ends = consumer.beginning_offsets(parts), consumer.end_offsets(parts)
        if all(starts[part] == ends[part] for part in parts):
            raise InvalidRequestError(f"topic {topic} has no records; raftlog perf produce {topic} writes some")
        began = time.perf_counter()
        consumer.assign(parts)
        consumer.seek_to_beginning(parts)
        got = data_bytes = 0
        first = last = began
        told = _Told(began)
        with _until_interrupted() as interrupted:
            for count, size in _polls(consumer, reading, records):
                now = time.perf_counter()
                if count and not got:
                    first = now
                got, data_bytes = got + count, data_bytes + size
                last = now if count else last
                told.look(now, got, data_bytes, ())
                if got >= records or now - began >= seconds or (not count and _at_ends(consumer, ends)):
                    break
        whole = last - began
    result = {**rates(got, data_bytes, whole), "first_record_ms": round((first - began) * 1000, 1)}
    _show(topic, result, (*_RATES, "first_record_ms"), output)
    if interrupted:
        raise KeyboardInterrupt


def _polls(consumer: raftlog.Consumer, reading: Reading, records: int) -> Iterator[tuple[int, int]]:
    """Yield the number of records of each poll, `records` in all, and the bytes of their keys and values."""
    import pyarrow.compute as pc

    left = records
    while left > 0:
        if reading is Reading.ARROW:
            table = consumer.poll_arrow(_POLL_S, left)
            sizes = (pc.sum(pc.binary_length(table.column(name))).as_py() or 0 for name in ("key", "value"))
            count, size = table.num_rows, sum(sizes)
        else:
            found = consumer.poll(_POLL_S)[:left]
            count, size = len(found), sum(len(each.value or b"") + len(each.key or b"") for each in found)
        left -= count
        yield count, size


def _at_ends(consumer: raftlog.Consumer, ends: Mapping[raftlog.TopicPartition, int]) -> bool:
    return all(consumer.position(part) >= end for part, end in ends.items())


@app.command("end-to-end")
def end_to_end(
    topic: TopicArgument,
    records: RecordsOption = 1000,
    seconds: SecondsOption = 60.0,
    record_size: SizeOption = 1000,
    acks: AcksOption = Acks.ALL,
    warm_up: Annotated[int, typer.Option(min=0, help="Records before the measurement.")] = 20,
    config: ConfigOption = None,
    create: CreateOption = False,
    partitions: PartitionsOption = None,
    replication_factor: ReplicationOption = None,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send one record at a time, and print how long each takes until a consumer has it.

    Other clients may write to the topic meanwhile: the command recognizes its own records. The topic's partitions take
    turns.

    Example: raftlog perf end-to-end events --records 2000 --record-size 100
    """
    _create(bootstrap, topic, create, partitions, replication_factor)
    tail = payloads(record_size)[0][8:]
    times_s = array("d")
    with (
        connect_producer(bootstrap, _settings(acks, {"linger.ms": 0}, config)) as producer,
        connect_consumer(bootstrap, "latest") as consumer,
    ):
        parts = consumer.partitions_for(topic)
        consumer.assign(parts)
        for part, end in consumer.end_offsets(parts).items():
            consumer.seek(part, end)
        run = random.SystemRandom().randrange(1 << 32)
        began = time.perf_counter()
        told = _Told(began)
        with _until_interrupted() as interrupted:
            for number in range(warm_up + records):
                value = run.to_bytes(4) + number.to_bytes(4) + tail
                sent = time.perf_counter()
                if sent - began >= seconds and times_s:
                    break
                delivery = producer.send(topic, value, partition=parts[number % len(parts)].partition)
                _await(consumer, value, sent + _ARRIVAL_S)
                if number == warm_up:
                    began = sent
                if number >= warm_up:
                    times_s.append(time.perf_counter() - sent)
                    told.look(time.perf_counter(), len(times_s), len(times_s) * record_size, times_s)
                delivery.result(_ARRIVAL_S)
        took = time.perf_counter() - began
    result = {**rates(len(times_s), len(times_s) * record_size, took), **latencies(times_s)}
    _show(topic, result, (*_RATES[:3], *_LATENCIES), output)
    if interrupted:
        raise KeyboardInterrupt


def _await(consumer: raftlog.Consumer, value: bytes, until: float) -> None:
    """Poll until the record is there.

    Raises:
        RequestTimedOut: the record did not arrive.
    """
    while time.perf_counter() < until:
        if any(record.value == value for record in consumer.poll(_POLL_S)):
            return
    raise RequestTimedOut(f"a record that was sent did not come within {_ARRIVAL_S:g} s; raftlog doctor may know why")
