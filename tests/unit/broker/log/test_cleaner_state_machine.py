"""Any mix of appends, overwrites, tombstones, cleanings, truncations, retention and restarts, against a model."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.log.config import LogConfig
from raftlog.format import Codec
from tests.support.fresh import examples
from tests.support.keyed_log import KeyedLog

RETENTION_MS = 100
CONFIG = LogConfig(
    segment_bytes=900,
    index_interval_bytes=200,
    cleanup_policy="compact",
    delete_retention_ms=RETENTION_MS,
    file_delete_delay_ms=10,
)
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
ROWS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.binary(max_size=60))), min_size=1, max_size=4)


class CompactedLog(RuleBasedStateMachine):
    """`written` has every record; of each tombstone it is known since when it has been clean."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KeyedLog(CONFIG)
        self.clean_since: dict[int, int] = {}
        self.deleted = 0
        self.sequence = 0

    @property
    def committed(self) -> int:
        """The high watermark."""
        return self.log.log.high_watermark

    @rule(rows=ROWS, codec=st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4]), stamped=st.booleans())
    def append(self, rows: list[tuple[bytes, bytes | None]], codec: Codec, stamped: bool) -> None:
        """Append a batch."""
        now = self.log.clock.now
        stamps = [now + number for number in range(len(rows))] if stamped else now
        self.log.append(*rows, timestamps_ms=stamps, codec=codec)

    @rule(rows=ROWS, producer=st.integers(1, 2))
    def append_numbered(self, rows: list[tuple[bytes, bytes | None]], producer: int) -> None:
        """Append a batch of an idempotent producer."""
        self.log.append(*rows, producer=(producer, 0, self.sequence))
        self.sequence += len(rows)

    @rule()
    def commit(self) -> None:
        """Flush and commit."""
        self.log.commit()

    @rule()
    def new_epoch(self) -> None:
        """Another leader."""
        self.log.epoch += 1

    @rule(rows=ROWS)
    def settle(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        """Append, commit and seal, so that it can be compacted."""
        self.log.append(*rows)
        self.log.log.roll()
        self.log.commit()

    @rule(millis=st.sampled_from([1, 40, RETENTION_MS]))
    def wait(self, millis: int) -> None:
        """Time goes by."""
        self.log.clock.now += millis

    @rule(dedupe_bytes=st.sampled_from([1, 1 << 20]))
    def clean(self, dedupe_bytes: int) -> None:
        """Compact."""
        before = self.log.records()
        bound = self.committed
        if self.log.clean(dedupe_bytes=dedupe_bytes):
            end = self.log.log.cleaned.first_dirty_offset
            assert end <= bound
            assert [r for r in before if r[0] >= bound] == [r for r in self.log.records() if r[0] >= bound]
            gone = {record[0] for record in before} - {record[0] for record in self.log.records()}
            last = {record[2]: record[0] for record in before if record[0] < end}
            for offset, _, key, value in before:
                if offset in gone and last[key] == offset:
                    assert value is None, (
                        f"the last record of its key at offset {offset} is gone, though it is no tombstone"
                    )
                    since = self.clean_since.get(offset)
                    assert since is not None, (
                        f"the tombstone at offset {offset} is gone, though no cleaning had passed it before"
                    )
                    assert self.log.clock.now - since >= RETENTION_MS, (
                        f"the tombstone at offset {offset} is gone {self.log.clock.now - since} ms after the first "
                        f"cleaning, before {RETENTION_MS} ms"
                    )
            for offset, _, _, value in before:
                if value is None and offset < end:
                    self.clean_since.setdefault(offset, self.log.clock.now)

    @rule(back=st.integers(0, 6))
    def truncate(self, back: int) -> None:
        """Cut what is not committed, as a follower does."""
        end = max(self.committed, self.log.log.log_end_offset - back)
        self.log.log.truncate_to(end, now_ms=self.log.clock.now)
        self._cut()

    @rule(share=st.floats(0, 1))
    def truncate_committed(self, share: float) -> None:
        """Truncate committed records: after an unclean election the new leader's records follow."""
        log = self.log.log
        if log.log_end_offset == log.log_start_offset:
            return
        offset = log.log_start_offset + int(share * (log.log_end_offset - log.log_start_offset))
        log.truncate_to(offset, now_ms=self.log.clock.now)
        self.log.epoch += 1
        self._cut()

    def _cut(self) -> None:
        end = self.log.log.log_end_offset
        self.log.written = [record for record in self.log.written if record[0] < end]
        self.clean_since = {offset: at for offset, at in self.clean_since.items() if offset < end}
        self._forget_what_was_compacted()

    def _forget_what_was_compacted(self) -> None:
        """A record that a truncated one had replaced does not come back."""
        found = {record[0] for record in self.log.records()}
        self.log.written = [record for record in self.log.written if record[0] in found or record[3] is None]

    @rule(seed=st.one_of(st.none(), st.integers(0, 99)))
    def restart(self, seed: int | None) -> None:
        """Kill -9, or power loss."""
        self.log.stop(None if seed is None else Random(seed))
        self.log.epoch = max(self.log.epoch, self.log.log.leader_epochs.latest_epoch)
        self.clean_since = {o: at for o, at in self.clean_since.items() if o < self.log.log.log_end_offset}

    @rule()
    def housekeeping(self) -> None:
        """Checkpoint, remove files."""
        assert self.log.manager is not None
        self.log.manager.run_housekeeping_once(self.log.clock.now)

    @invariant()
    def holds(self) -> None:
        """The log is what it must be."""
        self.log.check()


TestCompactedLog = CompactedLog.TestCase
TestCompactedLog.settings = settings(max_examples=examples(0.6), stateful_step_count=40, deadline=None)
