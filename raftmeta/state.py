"""The metadata state machine: what every controller does with every committed entry of the log, in the same way.

    bytes -> command -> fenced? -> answered before? -> decide -> records -> replay -> image
                                                                     +-> digest, kept answers

The image changes at the index of an entry that has records; entries without (refusals, retries, a leader's no-op) leave
gaps. What cannot be understood or contradicts itself is raised, and ends the node: going on would make it differ from
the others, and a snapshot taken then would make that permanent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from raftlog.errors import CorruptRecordError, FencedController, RaftlogError, UnsupportedVersion, to_wire
from raftlog.v1.records_pb2 import ClientSession, MetadataCommand, MetadataSnapshot, StateDigestCommand
from raftmeta.client_sessions import ClientSessions, SessionsCapture
from raftmeta.decide import CommandResult, decide
from raftmeta.features import SUPPORTED, check_supported
from raftmeta.image import FeatureSupport, MetadataImage
from raftmeta.port import Change
from raftmeta.replay import image_from_records, replay_all

SNAPSHOT_FORMAT = 1
DIGEST_BYTES = 16
MAX_KEPT_DIGESTS = 10_000
"""A leader's digest of an entry further back than this is not compared any more."""

OnChange = Callable[[MetadataImage, Change], None]
OnReset = Callable[[MetadataImage], None]


@dataclass(frozen=True, slots=True)
class Applied:
    """What applying an entry came to; `change` is None where the image stayed the same."""

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
            # Not kept: the client may ask again, through the present controller, and be heard.
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
        """Take note of a leader's first entry, which changes nothing: its claim is a command of its own."""
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
        """Take the state of a snapshot in place of the present one, which stays if it cannot be read: see `decode`."""
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
        """Take the state of a snapshot in place of the present one."""
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
    """Return what an entry without records leaves in the digest: its error code; the words may differ by version."""
    code = to_wire(outcome).code if isinstance(outcome, RaftlogError) else 0
    return code.to_bytes(4, "big")
