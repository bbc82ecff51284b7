"""A producer and a group of one consumer of kafka-python that check each other; runs in a pod.

    kafka_workload.py BOOTSTRAP TOPIC SECONDS

Prints what was sent, acknowledged and read, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from kafka import KafkaConsumer, KafkaProducer

REST_READ_S = 60.0
"""How long the consumer may take for all records."""


def main() -> None:
    """Produce for some seconds, and read it all."""
    bootstrap, topic, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    end_s = time.monotonic() + seconds
    sent: list[Any] = []
    while time.monotonic() < end_s:
        sent.append(producer.send(topic, b"%d" % len(sent)))
        time.sleep(0.01)
    producer.flush(60)
    places: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], int] = {}
    errors = []
    for number, delivery in enumerate(sent):
        if delivery.succeeded():
            places[delivery.value.partition, delivery.value.offset] = number
        else:
            errors.append(repr(delivery.exception))
    consumer = KafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=f"{topic}-readers", auto_offset_reset="earliest"
    )
    end_s = time.monotonic() + REST_READ_S
    while places.keys() - read.keys() and time.monotonic() < end_s:
        for records in consumer.poll(timeout_ms=500).values():
            read.update({(record.partition, record.offset): int(record.value) for record in records})
    consumer.close()
    print(
        json.dumps(
            {
                "sent": len(sent),
                "acked": len(places),
                "lost": sum(1 for place, number in places.items() if read.get(place) != number),
                "duplicates": len(read) - len(set(read.values())),
                "errors": errors[:5],
            }
        )
    )


if __name__ == "__main__":
    main()
