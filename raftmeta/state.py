"""The metadata state machine: what every controller does with every committed entry of the log, in the same way.

    bytes -> command -> fenced? -> answered before? -> decide -> records -> replay -> image
                                                                     +-> digest, kept answers

The image changes at the index of an entry that has records; entries without (refusals, retries, a leader's no-op) leave
gaps. An entry that cannot be parsed, or that contradicts the state, raises, and the node stops: if it continued, its
state would differ from the others', and its next snapshot would make that permanent.

What clients of commands have been answered, so that a command asked for twice is done once.

A client that does not learn what became of a command (its controller died) asks again with the same client id and
sequence, and gets the first answer. Part of the replicated state: every replica keeps the same, and snapshots carry it.

What is kept has a bound in bytes, so that no client can fill the memory of all controllers: at worst MAX_KEPT_BYTES,
as counted here, and in a process some two times that. The count does not depend on how long an error's words are:
replicas of different versions may word it differently, and must forget the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from raftlog.config import MAX_INT64
from raftlog.errors import (
    CorruptRecordError,
    FencedController,
    RaftlogError,
    RequestTimedOut,
    UnsupportedVersion,
    to_wire,
)
from raftlog.v1.records_pb2 import ClientSession, CommandOutcome, MetadataCommand, MetadataSnapshot, StateDigestCommand
from raftmeta.decide import MAX_ALTERATIONS_PER_COMMAND, CommandResult, decide, outcome_from_wire, outcome_to_wire
from raftmeta.decide.outcome import MAX_ALTERATION_ERROR_CHARACTERS, MAX_ERROR_CHARACTERS
from raftmeta.features import SUPPORTED, check_supported
from raftmeta.image import FeatureSupport, MetadataImage
from raftmeta.port import Change
from raftmeta.replay import image_from_records, replay_all

MAX_CLIENTS: Final = 10_000
MAX_OUTCOMES_PER_CLIENT: Final = 500
"""Clients keep the sequences that they have out within as many."""
MAX_KEPT_BYTES: Final = 64 << 20
SESSION_BYTES: Final = 512
OUTCOME_BYTES: Final = 256
ERROR_BYTES: Final = 2_048
"""What a session, a result without partitions, and an error count for."""
ALTERATION_BYTES: Final = 32
REFUSED_ALTERATION_BYTES: Final = 1_024
"""What each outcome of AlterPartitions counts for in addition, granted or refused."""

assert ERROR_BYTES >= 4 * MAX_ERROR_CHARACTERS, "a character has up to 4 bytes"
assert REFUSED_ALTERATION_BYTES >= 4 * MAX_ALTERATION_ERROR_CHARACTERS, "a character has up to 4 bytes"
assert (
    MAX_OUTCOMES_PER_CLIENT * (OUTCOME_BYTES + MAX_ALTERATIONS_PER_COMMAND * REFUSED_ALTERATION_BYTES) < MAX_KEPT_BYTES
), "the alterations of one client, all of them refused, have room"
assert MAX_CLIENTS * (SESSION_BYTES + 2 * OUTCOME_BYTES) < MAX_KEPT_BYTES, "as many clients as allowed, with little out"
assert MAX_OUTCOMES_PER_CLIENT * ERROR_BYTES < MAX_KEPT_BYTES // 10, "one client alone displaces no other"

_Kept = CommandResult | CommandOutcome
"""An answer. Errors are kept in their wire form: an exception would keep its traceback's frames alive."""


@dataclass(slots=True)
class _Session:
    """One client. Invariant: `outcomes` has no sequence below `settled_below`."""

    settled_below: int = 0
    last_used_index: int = 0
    outcomes: dict[int, _Kept] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What the session counts for."""
        return SESSION_BYTES + sum(map(_cost, self.outcomes.values()))

    def settle(self, below: int) -> int:
        """Forget the outcomes of sequences below `below`; return their size (bytes)."""
        outcomes = self.outcomes
        freed_bytes = 0
        if below - self.settled_below <= len(outcomes):
            for sequence in range(self.settled_below, below):
                kept = outcomes.pop(sequence, None)
                if kept is not None:
                    freed_bytes += _cost(kept)
        else:
            for sequence in [each for each in outcomes if each < below]:
                freed_bytes += _cost(outcomes.pop(sequence))
        self.settled_below = below
        return freed_bytes


@dataclass(frozen=True, slots=True)
class SessionsCapture:
    """All sessions at one index."""

    sessions: tuple[tuple[bytes, _Session], ...]

    def to_wire(self) -> Iterable[ClientSession]:
        """Yield the sessions as a snapshot holds them, by client id."""
        for client_id, session in sorted(self.sessions, key=lambda each: each[0]):
            yield ClientSession(
                client_id=client_id,
                settled_below=session.settled_below,
                last_used_index=session.last_used_index,
                outcomes={sequence: _wire(kept) for sequence, kept in session.outcomes.items()},
            )


class ClientSessions:
    """The sessions, bounded: the client that was silent longest goes first, then its retries are new commands.

    Invariant: sessions stand in the order of `last_used_index`, each of which belongs to one entry of the log.
    """

    def __init__(
        self,
        *,
        max_clients: int = MAX_CLIENTS,
        max_outcomes_per_client: int = MAX_OUTCOMES_PER_CLIENT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._max_clients = max_clients
        self._max_outcomes = max_outcomes_per_client
        self._max_bytes = max_kept_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def kept_bytes(self) -> int:
        """The size of all kept outcomes (bytes), as `MAX_KEPT_BYTES` limits it."""
        return self._bytes

    def answered(self, index: int, command: MetadataCommand) -> CommandResult | RaftlogError | None:
        """Return the earlier answer to this command; None if it is new and must be decided now.

        A sequence that the client has settled comes from a late message, whose answer is not awaited. A sequence whose
        outcome was dropped for lack of space may have been executed or not. Neither is executed now; the answer is
        final.
        """
        session = self._sessions.get(command.client_id)
        if session is None:
            return None
        known = session.outcomes.get(command.sequence)
        if known is None and command.sequence >= session.settled_below:
            return None
        self._use(command.client_id, session, index)
        if known is None:
            return RequestTimedOut(
                f"sequence {command.sequence} of this client is settled, as all below {session.settled_below}: the "
                "command may have been done before or not, and is not done now; see what is there, then decide"
            )
        return outcome_from_wire(known) if isinstance(known, CommandOutcome) else known

    def answer(self, index: int, command: MetadataCommand, outcome: CommandResult | RaftlogError) -> None:
        """Keep the answer to a command, and drop what its client says it does not need any more."""
        if not command.client_id:
            return
        session = self._sessions.get(command.client_id)
        if session is None:
            session = self._sessions[command.client_id] = _Session()
            self._bytes += SESSION_BYTES
            if len(self._sessions) > self._max_clients:
                self._drop_longest_silent()
        outcomes = session.outcomes
        assert command.sequence not in outcomes
        kept = outcome if isinstance(outcome, CommandResult) else outcome_to_wire(outcome)
        outcomes[command.sequence] = kept
        self._bytes += _cost(kept)
        settled_below = command.settled_below
        if len(outcomes) > self._max_outcomes:
            settled_below = max(settled_below, sorted(outcomes)[-self._max_outcomes])
        if settled_below > session.settled_below:
            self._bytes -= session.settle(settled_below)
        self._use(command.client_id, session, index)
        while self._bytes > self._max_bytes and len(self._sessions) > 1:
            self._drop_longest_silent()
        while self._bytes > self._max_bytes and session.outcomes:
            oldest = min(session.outcomes)
            self._bytes -= _cost(session.outcomes.pop(oldest))
            session.settled_below = max(session.settled_below, min(oldest + 1, MAX_INT64))

    def _drop_longest_silent(self) -> None:
        _, session = self._sessions.popitem(last=False)
        self._bytes -= session.size_bytes

    def _use(self, client_id: bytes, session: _Session, index: int) -> None:
        session.last_used_index = index
        self._sessions.move_to_end(client_id)

    def capture(self) -> SessionsCapture:
        """Return the sessions as they are now; they may go on changing."""
        return SessionsCapture(
            tuple(
                (client_id, _Session(session.settled_below, session.last_used_index, dict(session.outcomes)))
                for client_id, session in self._sessions.items()
            )
        )

    def restore(self, sessions: Iterable[ClientSession]) -> None:
        """Replace all sessions by those of a snapshot."""
        self._sessions.clear()
        self._bytes = 0
        for wire in sorted(sessions, key=lambda each: each.last_used_index):
            session = _Session(wire.settled_below, wire.last_used_index)
            for sequence, kept in wire.outcomes.items():
                outcome = outcome_from_wire(kept)
                session.outcomes[sequence] = outcome if isinstance(outcome, CommandResult) else kept
            self._sessions[wire.client_id] = session
            self._bytes += session.size_bytes


def _cost(kept: _Kept) -> int:
    if isinstance(kept, CommandOutcome):
        return ERROR_BYTES
    if not kept.partitions and not kept.alterations:
        return OUTCOME_BYTES
    refused = sum(each.HasField("error") for each in kept.alterations)
    return (
        OUTCOME_BYTES
        + sum(partition.ByteSize() for partition in kept.partitions)
        + refused * REFUSED_ALTERATION_BYTES
        + (len(kept.alterations) - refused) * ALTERATION_BYTES
    )


def _wire(kept: _Kept) -> CommandOutcome:
    return outcome_to_wire(kept) if isinstance(kept, CommandResult) else kept


SNAPSHOT_FORMAT = 1
DIGEST_BYTES = 16
MAX_KEPT_DIGESTS = 10_000
"""A leader's digest of an entry further back than this is not compared any more."""

OnChange = Callable[[MetadataImage, Change], None]
OnReset = Callable[[MetadataImage], None]


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of applying an entry; `change` is None if the image stayed the same."""

    outcome: CommandResult | RaftlogError
    change: Change | None


@dataclass(frozen=True, slots=True)
class DecodedState:
    """What a snapshot's bytes say."""

    image: MetadataImage
    index: int
    digest: bytes
    sessions: tuple[ClientSession, ...]


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The state at one index; nothing in it changes, so it may be encoded in another thread."""

    image: MetadataImage
    index: int
    digest: bytes
    sessions: SessionsCapture


class MetadataState:
    """Deterministic: the same entries, from the start or from any snapshot, give the same state on every node.

    Listeners are called in `apply` and `restore`, in the order in which they subscribed, and must not raise.
    """

    def __init__(self, *, features: Mapping[str, FeatureSupport] = SUPPORTED) -> None:
        self._features = features
        self._image = MetadataImage()
        self._index = 0
        self._digest = bytes(DIGEST_BYTES)
        self._digests: OrderedDict[int, bytes] = OrderedDict()
        self._sessions = ClientSessions()
        self._listeners: dict[object, tuple[OnChange, OnReset]] = {}

    @property
    def image(self) -> MetadataImage:
        """The image after the last entry applied."""
        return self._image

    @property
    def last_applied(self) -> int:
        """The index of the last entry applied."""
        return self._index

    def digest_command(self) -> StateDigestCommand | None:
        """Return this replica's digest, to be proposed and compared by all; None before the first command."""
        if not self._digests:
            return None
        index = next(reversed(self._digests))
        return StateDigestCommand(log_index=index, digest=self._digests[index])

    def subscribe(self, on_change: OnChange, on_reset: OnReset) -> Callable[[], None]:
        """Call `on_change` with every change and `on_reset` after a snapshot, until the returned function is called."""
        token = object()
        self._listeners[token] = (on_change, on_reset)

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    # ReplicatedState

    def apply(self, index: int, term: int, command: bytes) -> Applied:
        """Apply one committed entry.

        Raises:
            CorruptRecordError: it does not parse, or is the leader's digest and this replica has another one.
            UnsupportedVersion: this version does not know this kind of command, or a feature that it turns on.
        """
        self._advance(index)
        try:
            parsed = MetadataCommand.FromString(command)
        except DecodeError as error:
            raise CorruptRecordError(f"metadata entry {index} is no command: {error}") from None
        fenced = self._fence(parsed, term)
        if fenced is not None:
            # Not kept: the client may retry the command through the present controller.
            return Applied(fenced, None)
        kind = parsed.WhichOneof("command")
        if kind is None:
            raise UnsupportedVersion(
                f"metadata entry {index} is a command of a kind that this version does not know; "
                "it was written by a newer version, run that one or newer"
            )
        if kind == "state_digest":
            self._check_digest(parsed.state_digest)
        known = self._sessions.answered(index, parsed)
        if known is not None:
            return Applied(known, None)
        decision = decide(self._image, parsed, index)
        self._sessions.answer(index, parsed, decision.outcome)
        if not decision.records:
            self._roll(index, _code_of(decision.outcome))
            return Applied(decision.outcome, None)
        image = replay_all(self._image, decision.records, index)
        check_supported(image.features, self._features)
        self._image = image
        self._roll(index, b"".join(record.SerializeToString(deterministic=True) for record in decision.records))
        change = Change(index, image.controller_epoch, decision.records)
        for on_change, _ in list(self._listeners.values()):
            on_change(image, change)
        return Applied(decision.outcome, change)

    def begin_term(self, index: int, term: int) -> None:
        """Note a leader's first entry. It changes nothing: a command of its own claims the controller role."""
        assert term >= self._image.controller_epoch, f"term {term} after {self._image.controller_epoch}"
        self._advance(index)

    def capture(self) -> CapturedState:
        """Return the state as it is now, without copying what is in it."""
        return CapturedState(self._image, self._index, self._digest, self._sessions.capture())

    def encode(self, captured: object) -> bytes:
        """Return the bytes of a snapshot: equal states give equal bytes. May run in another thread."""
        assert isinstance(captured, CapturedState)
        snapshot = MetadataSnapshot(
            format=SNAPSHOT_FORMAT,
            log_index=captured.index,
            image_offset=captured.image.offset,
            digest=captured.digest,
        )
        snapshot.records.extend(captured.image.to_records())
        snapshot.sessions.extend(captured.sessions.to_wire())
        return snapshot.SerializeToString(deterministic=True)

    def restore(self, data: bytes, index: int, term: int) -> None:
        """Replace the state by that of a snapshot; an unreadable snapshot (see `decode`) leaves it unchanged."""
        self.adopt(self.decode(data, index, term))

    def decode(self, data: bytes, index: int, term: int) -> DecodedState:
        """Read the state of a snapshot; changes nothing, and may run in another thread.

        Raises:
            CorruptRecordError: it does not parse, or is of another index.
            UnsupportedVersion: written by a newer version.
        """
        try:
            snapshot = MetadataSnapshot.FromString(data)
        except DecodeError as error:
            raise CorruptRecordError(f"the metadata snapshot at index {index} does not parse: {error}") from None
        if snapshot.format != SNAPSHOT_FORMAT:
            raise UnsupportedVersion(
                f"the metadata snapshot at index {index} has format {snapshot.format}, this version reads "
                f"{SNAPSHOT_FORMAT}; run the version that wrote it or a newer one"
            )
        if snapshot.log_index != index or snapshot.image_offset > index or len(snapshot.digest) != DIGEST_BYTES:
            raise CorruptRecordError(
                f"the metadata snapshot at index {index} says it is of index {snapshot.log_index}, "
                f"offset {snapshot.image_offset}, with a digest of {len(snapshot.digest)} bytes"
            )
        try:
            image = image_from_records(snapshot.records, snapshot.image_offset)
        except (AssertionError, KeyError) as error:
            raise CorruptRecordError(
                f"the metadata snapshot at index {index} contradicts itself: {type(error).__name__}: {error}"
            ) from error
        if image.controller_epoch > term:
            raise CorruptRecordError(
                f"the metadata snapshot at index {index} is of term {term}, yet has controller epoch "
                f"{image.controller_epoch}"
            )
        check_supported(image.features, self._features)
        return DecodedState(image, index, snapshot.digest, tuple(snapshot.sessions))

    def adopt(self, decoded: object) -> None:
        """Replace the state by that of a snapshot."""
        assert isinstance(decoded, DecodedState)
        self._image = decoded.image
        self._index = decoded.index
        self._digest = decoded.digest
        self._digests.clear()
        self._sessions.restore(decoded.sessions)
        for _, on_reset in list(self._listeners.values()):
            on_reset(decoded.image)

    # Parts of apply

    def _advance(self, index: int) -> None:
        assert index > self._index, f"entry {index} after {self._index}"
        self._index = index

    def _fence(self, command: MetadataCommand, term: int) -> FencedController | None:
        """Refuse what was proposed in another term than it was committed in, or before that term's claim."""
        claims = command.WhichOneof("command") == "claim_controller"
        epoch = command.controller_epoch
        if epoch == term and (claims or epoch == self._image.controller_epoch):
            return None
        return FencedController(
            f"the command was proposed in controller epoch {epoch} and committed in term {term}, "
            f"the cluster's epoch is {self._image.controller_epoch} of controller {self._image.controller_id}; "
            "it changed nothing, ask the active controller again"
        )

    def _check_digest(self, command: StateDigestCommand) -> None:
        own = self._digests.get(command.log_index)
        if own is not None and own != command.digest:
            raise CorruptRecordError(
                f"the metadata of this node is not what the controller has: at index {command.log_index} its digest "
                f"is {own.hex()}, the controller's {command.digest.hex()}; remove this node's metadata directory, "
                "and it takes a copy of the others'"
            )

    def _roll(self, index: int, came_to: bytes) -> None:
        """Let the digest cover one more entry."""
        head = self._digest + index.to_bytes(8, "big")
        self._digest = hashlib.blake2b(head + came_to, digest_size=DIGEST_BYTES).digest()
        self._digests[index] = self._digest
        if len(self._digests) > MAX_KEPT_DIGESTS:
            self._digests.popitem(last=False)


def _code_of(outcome: CommandResult | RaftlogError) -> bytes:
    """Return what the digest covers of an entry without records: its error codes, as messages differ by version."""
    if isinstance(outcome, RaftlogError):
        return to_wire(outcome).code.to_bytes(4, "big")
    codes = [0, *(each.error.code for each in outcome.alterations)]
    return b"".join(code.to_bytes(4, "big") for code in codes)
