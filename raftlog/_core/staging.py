"""Staged batches, as far as they are values: what a stage leaves behind, and what a batch of them comes to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from raftlog.errors import InvalidRequestError

NO_PRODUCER: Final = -1
"""The producer id of a stage that nothing was staged in."""
NO_BATCH: Final = -1
"""The last batch of a sink that has committed none."""
MAX_ID_CHARACTERS: Final = 255
"""As long as the id of a sink, or a transactional id, may be."""


class StageToken(NamedTuple):
    """A finished stage: all its records are in the log, where nobody reads them before a commit names this token.

    It is a small value that may travel, pickled or as JSON, from the process that wrote to the one that commits.
    """

    sink_id: str
    batch_id: int
    producer_id: int = NO_PRODUCER
    """The stage's name at the coordinator; -1: nothing was staged."""
    records: int = 0
    already_committed: bool = False
    """The sink had committed the batch before: nothing was staged, and there is nothing to commit."""

    def to_json(self) -> str:
        """Return the token as one line of JSON."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> StageToken:
        """Return the token that `to_json` made.

        Raises:
            InvalidRequestError: that is not one.
        """
        try:
            found: Any = json.loads(text)
            token = StageToken(**found)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"{text!r} is no stage token ({error}); use what StageToken.to_json gave"
            ) from None
        _check_token(token)
        return token


class CommittedBatch(NamedTuple):
    """The answer to a commit."""

    batch_id: int
    already_committed: bool
    """The batch, or a later one, was committed before; what was staged for it again was dropped."""
    records: int
    """How many records of the tokens readers see by this commit; 0 when it was committed before."""


class CommitPlan(NamedTuple):
    """What a commit of tokens asks the coordinator for."""

    producer_ids: list[int]
    """Of the stages that hold something."""
    repeated: bool
    """Some of the stages found the batch committed: it is never committed again, whatever the others hold."""
    records: int


def check_sink_id(sink_id: str) -> str:
    """Return the id of a sink.

    Raises:
        TypeError: not a string.
        InvalidRequestError: empty, or too long.
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
        InvalidRequestError: below 0, or more than 63 bits.
    """
    if not isinstance(batch_id, int) or isinstance(batch_id, bool):
        raise TypeError(f"batch_id is {type(batch_id).__name__}, expected int")
    if not 0 <= batch_id < 1 << 63:
        raise InvalidRequestError(f"batch_id={batch_id}: batches are numbered from 0 on, each higher than the last")
    return batch_id


def _check_token(token: StageToken) -> None:
    if not isinstance(token, StageToken):
        raise TypeError(f"{token!r} is no StageToken; Stage.finish returns one")
    check_sink_id(token.sink_id)
    check_batch_id(token.batch_id)
    for name in ("producer_id", "records"):
        number = getattr(token, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < -1:
            raise InvalidRequestError(f"a stage token with {name}={number!r}")
    if not isinstance(token.already_committed, bool):
        raise InvalidRequestError(f"a stage token with already_committed={token.already_committed!r}")


def plan_commit(sink_id: str, batch_id: int, tokens: Iterable[StageToken]) -> CommitPlan:
    """Return what the commit of a batch by these tokens comes to.

    Raises:
        TypeError: something is no token.
        InvalidRequestError: a token of another sink or batch, or one twice.
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
        TypeError: something is no token.
        InvalidRequestError: a token of another sink.
    """
    found: dict[int, None] = {}
    for token in tokens:
        _check_token(token)
        if token.sink_id != sink_id:
            raise InvalidRequestError(f"a stage of sink {token.sink_id!r} is not one of sink {sink_id!r}")
        if token.producer_id != NO_PRODUCER:
            found[token.producer_id] = None
    return list(found)
