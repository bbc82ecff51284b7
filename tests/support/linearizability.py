"""Was there an order? Checks a history of concurrent operations against what a sequential object would answer.

A history is linearizable if every operation can be given one moment between its invocation and its answer so that,
taken in that order, each answer is the one the sequential object gives (Herlihy and Wing 1990). An operation without
an answer may have happened at any moment after its invocation, or never.

The search is that of Wing and Gong with Lowe's memory of configurations: take an operation that can come next, go on,
and step back where none can. It is exponential at worst, and linear where few operations overlap. Objects that do not
touch one another (keys) are searched one by one.

An answered operation that fits and changes nothing, such as a read, is placed at once: whatever follows is as possible
after it. Operations without an answer overlap everything after them, so the search places as few of them as it can: one
more only when it can go nowhere without; none that changes nothing; of two that ask for the same, the earlier. A
configuration that was reached before with some of them is not looked at again with these and others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class _NoAnswer:
    """The type of NO_ANSWER."""

    def __repr__(self) -> str:
        return "NO_ANSWER"


NO_ANSWER = _NoAnswer()
"""The answer of an operation that was never answered."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one client. Times are of one clock; `returned_at` is None as long as there is no answer."""

    client: int
    invoked_at: float
    returned_at: float | None
    request: object
    answer: object = NO_ANSWER

    def __post_init__(self) -> None:
        assert (self.returned_at is None) == (self.answer is NO_ANSWER), (
            f"{self} must have both an answer and the time of it, or neither"
        )
        assert self.returned_at is None or self.returned_at >= self.invoked_at, (
            f"{self} was answered before it was asked"
        )

    def __str__(self) -> str:
        until = "never" if self.returned_at is None else f"{self.returned_at:.4f}"
        return f"client {self.client} {self.invoked_at:.4f}..{until}: {self.request} -> {self.answer}"


class Model(Protocol[State]):
    """The sequential object: deterministic, its states hashable."""

    @property
    def initial(self) -> State:
        """What it is before the first operation."""
        ...

    def step(self, state: State, request: object, answer: object) -> tuple[bool, State]:
        """Return whether `request` is answered so in `state` (NO_ANSWER always is), and the state after it."""
        ...


class NotLinearizable(AssertionError):
    """There is no order. The message shows the operations around the answer that cannot be."""


def check_by_key(
    history: Iterable[Operation], model: Model[State], key_of: Callable[[Operation], Key]
) -> dict[Key, int]:
    """Check the operations of each key separately; return how many each key had.

    Raises:
        NotLinearizable: naming the key.
    """
    by_key: dict[Key, list[Operation]] = defaultdict(list)
    for operation in history:
        by_key[key_of(operation)].append(operation)
    for key, operations in by_key.items():
        try:
            check(operations, model)
        except NotLinearizable as error:
            raise NotLinearizable(f"{key}: {error}") from None
    return {key: len(operations) for key, operations in by_key.items()}


def check(history: Sequence[Operation], model: Model[State]) -> list[Operation]:
    """Return the operations in an order that explains every answer; those that never happened are left out.

    Raises:
        NotLinearizable: there is none.
    """
    return _Search(history, model).run()


class _Node(NamedTuple, Generic[State]):
    """A configuration: what is placed so far (bits of two ints), the state after it, and how the search came there."""

    answered: int
    unanswered: int
    state: State
    last: Operation | None
    before: _Node[State] | None

    def path(self) -> list[Operation]:
        found: list[Operation] = []
        node: _Node[State] | None = self
        while node is not None:
            if node.last is not None:
                found.append(node.last)
            node = node.before
        return found[::-1]


class _Search(Generic[State]):
    """One search."""

    def __init__(self, history: Sequence[Operation], model: Model[State]) -> None:
        self._model = model
        by_start = sorted(history, key=lambda each: each.invoked_at)
        self._answered = [each for each in by_start if each.returned_at is not None]
        self._unanswered = [each for each in by_start if each.returned_at is None]
        self._seen: dict[tuple[int, State], list[int]] = defaultdict(list)
        """By answered operations placed, and state: the smallest sets of others with which the search was there."""

    def run(self) -> list[Operation]:
        everything = (1 << len(self._answered)) - 1
        longest = start = _Node(0, 0, self._model.initial, None, None)
        now, later = [start], list[_Node[State]]()  # later: with one unanswered operation more
        while now or later:
            if not now:
                now, later = later, now
            node = now.pop()
            if node.answered == everything:
                return node.path()
            longest = max(longest, node, key=lambda each: each.answered.bit_count())
            for following in reversed(self._following(node)):
                (now if following.unanswered == node.unanswered else later).append(following)
        raise NotLinearizable(self._describe(longest))

    def _following(self, node: _Node[State]) -> list[_Node[State]]:
        """Return the configurations with one operation more, as far as they have to be looked at."""
        answered, end = self._can_come_next(node.answered)
        found: list[_Node[State]] = []
        for number in answered:
            operation = self._answered[number]
            fits, state = self._model.step(node.state, operation.request, operation.answer)
            if fits:
                found.append(_Node(node.answered | 1 << number, node.unanswered, state, operation, node))
                if state == node.state:
                    found = found[-1:]
                    break
        else:
            asked: set[object] = set()
            for number, operation in enumerate(self._unanswered):
                if operation.invoked_at > end:
                    break
                if node.unanswered >> number & 1 or operation.request in asked:
                    continue
                asked.add(operation.request)
                _, state = self._model.step(node.state, operation.request, NO_ANSWER)
                if state != node.state:
                    found.append(_Node(node.answered, node.unanswered | 1 << number, state, operation, node))
        return [each for each in found if self._is_new(each)]

    def _can_come_next(self, placed: int) -> tuple[list[int], float]:
        """Return the answered operations, not placed, that begin before the first of these ends; and when that is."""
        end, found = math.inf, []
        for number in range((~placed & placed + 1).bit_length() - 1, len(self._answered)):
            operation = self._answered[number]
            if operation.invoked_at > end:
                break
            if not placed >> number & 1:
                assert operation.returned_at is not None
                found.append(number)
                end = min(end, operation.returned_at)
        return [number for number in found if self._answered[number].invoked_at <= end], end

    def _is_new(self, node: _Node[State]) -> bool:
        before = self._seen[node.answered, node.state]
        if any(each & node.unanswered == each for each in before):
            return False
        before.append(node.unanswered)
        return True

    def _describe(self, longest: _Node[State]) -> str:
        path = longest.path()
        placed = set(map(id, path))
        rest = [each for each in self._answered if id(each) not in placed]
        return "\n  ".join(
            [
                f"no order explains {len(self._answered)} answers; the longest that was found ends in",
                *map(str, path[-8:]),
                f"state: {longest.state}; none of these can come next:",
                *map(str, rest[:8]),
            ]
        )
