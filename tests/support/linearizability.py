"""Was there an order? Checks a history of concurrent operations against what a sequential object would answer.

A history is linearizable if every operation can be given one moment between its invocation and its answer so that,
taken in that order, each answer is the one the sequential object gives (Herlihy and Wing 1990). An operation without
an answer may have happened at any moment after its invocation, or never.

The search is that of Wing and Gong with Lowe's memory of configurations: take the first operation that can come next,
go on, and step back when the answer of an operation comes before the operation could be placed. It is exponential at
worst, and linear where few operations overlap. Objects that do not touch one another (keys) are searched one by one.

Operations without an answer overlap everything that comes later, so there can be many. Two rules keep them from being
tried in every combination, and lose no order: one that would change nothing is not placed, as it can be left out; and
of those with the same request the one that was invoked first is placed first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

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
        assert (self.returned_at is None) == (self.answer is NO_ANSWER)
        assert self.returned_at is None or self.returned_at >= self.invoked_at

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
    """Check the operations of each key by themselves; return how many each had.

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


class _Event:
    """An invocation or an answer in the list of those not placed yet; both ends of the list are no events."""

    __slots__ = ("answer", "before", "needs", "number", "operation", "then")

    def __init__(self, number: int, operation: Operation | None) -> None:
        self.number = number
        self.operation = operation
        self.answer: _Event | None = None
        """Of an invocation: its answer; None for an answer, or where there is none."""
        self.needs = 0
        """Of an invocation: the operations that are placed before it, as bits."""
        self.before: _Event = self
        self.then: _Event | None = None


class _Search(Generic[State]):
    """One search. `_placed` is the set of placed operations as the bits of an int."""

    def __init__(self, history: Sequence[Operation], model: Model[State]) -> None:
        self._history = sorted(history, key=lambda each: each.invoked_at)
        self._model = model
        self._to_answer = sum(each.returned_at is not None for each in history)
        self._head = self._build()
        self._longest: list[Operation] = []

    def _build(self) -> _Event:
        events: list[tuple[float, int, _Event]] = []
        unanswered: dict[object, int] = {}  # by request: the last one
        for number, operation in enumerate(self._history):
            invocation = _Event(number, operation)
            events.append((operation.invoked_at, 0, invocation))  # at equal times the two overlap
            if operation.returned_at is None:
                invocation.needs = 1 << unanswered[operation.request] if operation.request in unanswered else 0
                unanswered[operation.request] = number
            else:
                invocation.answer = _Event(number, None)
                events.append((operation.returned_at, 1, invocation.answer))
        events.sort(key=lambda each: each[:2])
        head = last = _Event(-1, None)
        for _, _, event in events:
            last.then, event.before = event, last
            last = event
        return head

    def run(self) -> list[Operation]:
        state = self._model.initial
        placed, answered = 0, 0
        seen: set[tuple[int, State]] = set()
        path: list[tuple[_Event, State]] = []
        event = self._head.then
        while answered < self._to_answer:
            operation = None if event is None else event.operation
            if event is not None and operation is not None:
                fits, after = self._model.step(state, operation.request, operation.answer)
                if event.answer is None:
                    fits = fits and after != state and not event.needs & ~placed
                configuration = (placed | 1 << event.number, after)
                if fits and configuration not in seen:
                    seen.add(configuration)
                    path.append((event, state))
                    placed, state = configuration
                    answered += event.answer is not None
                    _take_out(event)
                    event = self._head.then
                else:
                    event = event.then
                continue
            # An answer whose operation is not placed, so that what was placed before it was not placed well.
            if len(path) >= len(self._longest):
                self._longest = [each.operation for each, _ in path if each.operation is not None]
            if not path:
                raise NotLinearizable(self._describe())
            last, state = path.pop()
            placed ^= 1 << last.number
            answered -= last.answer is not None
            _put_back(last)
            event = last.then
        return [each.operation for each, _ in path if each.operation is not None]

    def _describe(self) -> str:
        state = self._model.initial
        for operation in self._longest:
            _, state = self._model.step(state, operation.request, operation.answer)
        placed = {id(each) for each in self._longest}
        rest = [each for each in self._history if id(each) not in placed]
        return "\n  ".join(
            [
                f"no order explains the answers of {len(self._history)} operations; the longest that was found ends in",
                *map(str, self._longest[-8:]),
                f"state: {state}; none of these can come next:",
                *map(str, rest[:8]),
            ]
        )


def _take_out(invocation: _Event) -> None:
    for event in (invocation, invocation.answer):
        if event is not None:
            event.before.then = event.then
            if event.then is not None:
                event.then.before = event.before


def _put_back(invocation: _Event) -> None:
    for event in (invocation.answer, invocation):
        if event is not None:
            event.before.then = event
            if event.then is not None:
                event.then.before = event
