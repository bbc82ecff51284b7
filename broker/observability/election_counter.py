"""Counts leader changes on the node that decides on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.observability.counters import Counters
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import NO_LEADER, MetadataImage


class ElectionCounter:
    """A listener of the metadata: counts partitions that got another leader while this node is the active controller.

    A partition that is new counts not, and one that lost its leader only once it has the next.
    """

    def __init__(self, counters: Counters, is_active: Callable[[], bool], image: MetadataImage) -> None:
        self._counters = counters
        self._is_active = is_active
        self._image = image

    def __call__(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        """Take a change of the metadata; None: there is another image altogether."""
        before, self._image = self._image, image
        if records is None or not self._is_active():
            return
        for record in records:
            if record.WhichOneof("record") != "partition":
                continue
            part = record.partition
            was = before.partition(part.topic_id, part.partition)
            if was is not None and part.leader != NO_LEADER and part.leader != was.leader:
                self._counters.leader_elections += 1
                self._counters.unclean_leader_elections += part.unclean_election
