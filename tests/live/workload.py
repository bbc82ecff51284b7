"""A producer and a group of one consumer that check each other; runs in a pod, with nothing but the SDK.

    workload.py TOPIC RATE PORT

Connection settings come from RAFTLOG_BOOTSTRAP and the other RAFTLOG_ variables, as those of the command line do.
Over HTTP, `/step` answers what has happened since the last such question, and `/finish` ends the producer, lets the
consumer read the rest, and answers with the whole result.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from raftlog import Consumer, Producer
from raftlog.errors import RaftlogError

REST_READ_S = 120.0
"""How long the consumer may take for the rest."""
NOTED_GAP_S = 0.5
"""A pause between two acknowledgements for which the pod's log has a line, beside what the client did meanwhile."""
SETTINGS = {
    name.removeprefix("RAFTLOG_").lower().replace("_", "."): value
    for name, value in os.environ.items()
    if name.startswith("RAFTLOG_") and name != "RAFTLOG_BOOTSTRAP"
}


class Checks:
    """The records that were sent, acknowledged and read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.places: dict[int, tuple[int, int]] = {}
        """Acknowledged number → partition and offset."""
        self.read: dict[tuple[int, int], int] = {}
        self.sent = 0
        self.errors: list[str] = []
        self.producing = True
        self.reading = True
        self._last_s = time.monotonic()
        self._gap_s = 0.0
        self._gap_ended = ""
        self._longest_s = 0.0
        self._step = (0, 0)

    def acknowledged(self, number: int, place: tuple[int, int]) -> None:
        """Note an acknowledgement."""
        now_s = time.monotonic()
        with self.lock:
            self.places[number] = place
            gap_s = now_s - self._last_s
            if gap_s > NOTED_GAP_S:
                logging.warning("no acknowledgement for %.2f s, now one of partition %d", gap_s, place[0])
            if gap_s > self._gap_s:
                self._gap_s = gap_s
                self._gap_ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            self._last_s = now_s

    def failed(self, where: str, error: BaseException) -> None:
        """Note an error that the client saw."""
        with self.lock:
            self.errors.append(f"{where}: {type(error).__name__}: {error}"[:500])

    def step(self) -> dict[str, Any]:
        """Return the changes since the last step, and begin a new step."""
        with self.lock:
            gap_s = max(self._gap_s, time.monotonic() - self._last_s)
            acked, errors = len(self.places), len(self.errors)
            found = {
                "gap_s": round(gap_s, 2),
                "gap_ended": self._gap_ended,
                "acked": acked - self._step[0],
                "errors": self.errors[self._step[1] :],
            }
            self._longest_s = max(self._longest_s, gap_s)
            self._gap_s, self._step = 0.0, (acked, errors)
            return found

    def result(self) -> dict[str, Any]:
        """Return everything, after the end."""
        with self.lock:
            lost = [number for number, place in self.places.items() if self.read.get(place) != number]
            values = list(self.read.values())
            return {
                "sent": self.sent,
                "acked": len(self.places),
                "read": len(self.read),
                "lost": len(lost),
                "first_lost": lost[:5],
                "duplicates": len(values) - len(set(values)),
                "errors": self.errors,
                "longest_gap_s": round(max(self._longest_s, self._gap_s), 2),
            }

    def is_complete(self) -> bool:
        """Whether all acknowledged records have been read."""
        with self.lock:
            return all(place in self.read for place in self.places.values())


def produce(checks: Checks, bootstrap: str, topic: str, rate: float) -> None:
    """Send numbered records until the end, and wait for all acknowledgements."""
    with Producer(bootstrap, acks="all", config=SETTINGS) as producer:
        begun_s = time.monotonic()
        while checks.producing:
            while checks.sent < (time.monotonic() - begun_s) * rate:
                number = checks.sent
                checks.sent += 1
                try:
                    delivery = producer.send(topic, (b"%d" % number).ljust(200), key=b"%d" % number)
                except RaftlogError as error:
                    checks.failed(f"send {number}", error)
                    continue

                def done(_: object, delivery: Any = delivery, number: int = number) -> None:
                    error = delivery.exception(0)
                    if error is None:
                        found = delivery.result(0)
                        checks.acknowledged(number, (found.partition, found.offset))
                    else:
                        checks.failed(f"record {number}", error)

                delivery.add_done_callback(done)
            time.sleep(0.02)
        producer.flush(150)


def consume(checks: Checks, bootstrap: str, topic: str) -> None:
    """Read in a group until the end."""
    with Consumer(
        bootstrap,
        group_id=f"{topic}-readers",
        auto_offset_reset="earliest",
        auto_commit_interval_ms=500,
        config=SETTINGS,
    ) as consumer:
        consumer.subscribe([topic])
        while checks.reading:
            try:
                for record in consumer.poll(0.5):
                    with checks.lock:
                        checks.read[record.partition, record.offset] = int(record.value or b"-1")
            except RaftlogError as error:
                checks.failed("poll", error)


def main() -> None:
    """Run until the pod is deleted."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("raftlog").setLevel(logging.DEBUG)
    bootstrap, topic, rate, port = os.environ["RAFTLOG_BOOTSTRAP"], sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    checks = Checks()
    producing = threading.Thread(target=produce, args=(checks, bootstrap, topic, rate), daemon=True)
    reading = threading.Thread(target=consume, args=(checks, bootstrap, topic), daemon=True)

    def finish() -> dict[str, Any]:
        checks.producing = False
        producing.join()
        end_s = time.monotonic() + REST_READ_S
        while time.monotonic() < end_s and not checks.is_complete():
            time.sleep(0.2)
        checks.reading = False
        reading.join(30)
        return checks.result()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that the base class calls
            found = finish() if self.path == "/finish" else checks.step()
            content = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    producing.start()
    reading.start()
    ThreadingHTTPServer(("0.0.0.0", port), Answers).serve_forever()


if __name__ == "__main__":
    main()
