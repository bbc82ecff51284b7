"""Values of staged batches: tokens of stages, and the plan to commit a batch of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from raftlog.errors import InvalidRequestError

NO_PRODUCER: Final = -1
"""The producer id of a stage without records."""
NO_BATCH: Final = -1
"""The last batch of a sink that has committed none."""
MAX_ID_CHARACTERS: Final = 255
"""The longest sink id or transactional id."""


class StageToken(NamedTuple):
    """A finished stage: its records are in the log, but invisible until a commit names this token.

    A small value, to send as a pickle or JSON from the process that wrote the records to the one that commits.
    """

    sink_id: str
    batch_id: int
    producer_id: int = NO_PRODUCER
    """The stage's id at its coordinator; -1: the stage has no records."""
    records: int = 0
    already_committed: bool = False
    """Whether the sink had already committed the batch: then the stage has no records and needs no commit."""

    def to_json(self) -> str:
        """Return the token as one line of JSON."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> StageToken:
        """Return the token that `to_json` made.

        Raises:
            InvalidRequestError: the text is not a token.
        """
        try:
            found: Any = json.loads(text)
            token = StageToken(**found)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"{text!r} is not a stage token ({error}); use the text of StageToken.to_json"
            ) from None
        _check_token(token)
        return token


class CommittedBatch(NamedTuple):
    """The result of a commit."""

    batch_id: int
    already_committed: bool
    """Whether this batch or a later one was committed before; then the records that were staged again are dropped."""
    records: int
    """How many records this commit made visible; 0 if the batch was committed before."""


class CommitPlan(NamedTuple):
    """The request of a commit to the coordinator."""

    producer_ids: list[int]
    """The producer ids of the stages with records."""
    repeated: bool
    """Whether a stage found the batch committed: then it must not be committed again, even if others have records."""
    records: int


def check_sink_id(sink_id: str) -> str:
    """Return the id of a sink.

    Raises:
        TypeError: not a string.
        InvalidRequestError: the id is empty or too long.
    """
    if not isinstance(sink_id, str):
        raise TypeError(f"sink_id is {type(sink_id).__name__}, expected str")
    if not 0 < len(sink_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"a sink id has 1 to {MAX_ID_CHARACTERS} characters, this one has {len(sink_id)}")
    return sink_id


def check_batch_id(batch_id: int) -> int:
    """Return the number of a batch.

    Raises:
        TypeError: not an int.
        InvalidRequestError: the number is negative or has more than 63 bits.
    """
    if not isinstance(batch_id, int) or isinstance(batch_id, bool):
        raise TypeError(f"batch_id is {type(batch_id).__name__}, expected int")
    if not 0 <= batch_id < 1 << 63:
        raise InvalidRequestError(f"batch_id={batch_id}: batches are numbered from 0, each higher than the last")
    return batch_id


def _check_token(token: StageToken) -> None:
    if not isinstance(token, StageToken):
        raise TypeError(f"{token!r} is not a StageToken; Stage.finish returns one")
    check_sink_id(token.sink_id)
    check_batch_id(token.batch_id)
    for name in ("producer_id", "records"):
        number = getattr(token, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < -1:
            raise InvalidRequestError(f"a stage token has the invalid {name}={number!r}")
    if not isinstance(token.already_committed, bool):
        raise InvalidRequestError(f"a stage token has the invalid already_committed={token.already_committed!r}")


def plan_commit(sink_id: str, batch_id: int, tokens: Iterable[StageToken]) -> CommitPlan:
    """Return the plan to commit a batch by these tokens.

    Raises:
        TypeError: a value is not a token.
        InvalidRequestError: a token belongs to another sink or batch, or occurs twice.
    """
    check_batch_id(batch_id)
    producer_ids: list[int] = []
    records = 0
    repeated = False
    for token in tokens:
        _check_token(token)
        if token.sink_id != sink_id:
            raise InvalidRequestError(f"a stage of sink {token.sink_id!r} cannot be committed for sink {sink_id!r}")
        if token.batch_id != batch_id:
            raise InvalidRequestError(f"a stage of batch {token.batch_id} cannot be committed with batch {batch_id}")
        repeated |= token.already_committed
        records += token.records
        if token.producer_id != NO_PRODUCER:
            producer_ids.append(token.producer_id)
    if len(set(producer_ids)) != len(producer_ids):
        raise InvalidRequestError(f"a stage is named twice in the commit of batch {batch_id}; name each once")
    return CommitPlan(producer_ids, repeated, records)


def stages_of(sink_id: str, tokens: Iterable[StageToken]) -> list[int]:
    """Return the producer ids of the tokens' stages, each once.

    Raises:
        TypeError: a value is not a token.
        InvalidRequestError: a token belongs to another sink.
    """
    found: dict[int, None] = {}
    for token in tokens:
        _check_token(token)
        if token.sink_id != sink_id:
            raise InvalidRequestError(f"a stage of sink {token.sink_id!r} does not belong to sink {sink_id!r}")
        if token.producer_id != NO_PRODUCER:
            found[token.producer_id] = None
    return list(found)
