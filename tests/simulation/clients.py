"""Clients of the quorum: they create, change, delete and read a few topics, all at once, and keep a history of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftlog.errors import RaftlogError, TopicAlreadyExists, UnknownTopicOrPartition
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, ElectLeadersCommand, MetadataCommand
from raftmeta.image import MetadataImage
from tests.simulation.process import Host, Process
from tests.simulation.requests import Requester
from tests.simulation.voter import Committed
from tests.support.linearizability import NO_ANSWER, Operation

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation
    from tests.simulation.voter import Voter

TOPICS = 5
THINK_S = (0.01, 0.25)

TopicState = tuple[bytes, str | None] | None
"""Topic id and retention.ms; None: there is no such topic."""


class TopicModel:
    """A topic, as the sequential object that clients are promised.

    Requests are ("create", topic id), ("delete",), ("set", value) and ("read",). Answers are "ok", "exists",
    "unknown", "refused" (for a reason that has nothing to do with this topic), and what was read.
    """

    initial: TopicState = None

    def step(self, state: TopicState, request: object, answer: object) -> tuple[bool, TopicState]:
        """See `tests.support.linearizability.Model`."""
        assert isinstance(request, tuple)
        if answer == "refused":
            return True, state
        match request[0]:
            case "create":
                return self._change(answer, state, (request[1], None), possible=state is None, otherwise="exists")
            case "delete":
                return self._change(answer, state, None, possible=state is not None, otherwise="unknown")
            case "set":
                after = None if state is None else (state[0], request[1])
                return self._change(answer, state, after, possible=state is not None, otherwise="unknown")
            case _:
                return answer in (NO_ANSWER, state), state

    @staticmethod
    def _change(
        answer: object, before: TopicState, after: TopicState, *, possible: bool, otherwise: str
    ) -> tuple[bool, TopicState]:
        expected = "ok" if possible else otherwise
        return answer in (NO_ANSWER, expected), after if possible else before


def topic_state(image: MetadataImage, name: str) -> TopicState:
    """Return a topic as the model has it."""
    topic = image.topic(name)
    return (
        None if topic is None else (topic.requested_id or topic.topic_id, image.topic_configs(name).get("retention.ms"))
    )


def answer_of(outcome: object) -> str:
    """Return an outcome as the model has it."""
    if isinstance(outcome, TopicAlreadyExists):
        return "exists"
    if isinstance(outcome, UnknownTopicOrPartition):
        return "unknown"
    return "refused" if isinstance(outcome, RaftlogError) else "ok"


class Client:
    """One client: one operation after the other."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation = simulation
        self.number = number
        self.history: list[tuple[str, Operation]] = []
        """(topic name, operation), those with an answer."""
        self.open: tuple[str, float, object] | None = None
        """The operation under way."""
        self._random = simulation.random
        self._value = 0
        host = Host(simulation, 100 + number)
        self._process = Process(host)
        self._requester = Requester(self._process, self._random)
        self._process.after(self._random.uniform(0.3, 1.0), self._next)

    def operations(self) -> list[tuple[str, Operation]]:
        """Return the whole history; what is under way has no answer."""
        if self.open is None:
            return self.history
        name, invoked_at, request = self.open
        return [*self.history, (name, Operation(self.number, invoked_at, None, request))]

    def _next(self) -> None:
        if self.simulation.winding_down:
            return
        name = f"topic-{self._random.randrange(TOPICS)}"
        draw = self._random.random()
        if draw < 0.30:
            self._begin(name, ("read",))
            self._requester.read(lambda image: self._done(topic_state(image, name)))
        elif draw < 0.50:
            topic_id = self._random.randbytes(16)
            self._begin(name, ("create", topic_id))
            replicas = self._random.randint(1, min(3, len(self.simulation.broker_ids)))
            create = records_pb2.CreateTopicCommand(
                name=name, topic_id=topic_id, partitions=self._random.randint(1, 3), replication_factor=replicas
            )
            self._propose(MetadataCommand(create_topic=create))
        elif draw < 0.58:
            self._begin(name, ("delete",))
            self._propose(MetadataCommand(delete_topic=records_pb2.DeleteTopicCommand(name=name)))
        elif draw < 0.70:
            self._elect_preferred()
        else:
            self._value += 1
            value = str(self.number * 1_000_000 + self._value)
            self._begin(name, ("set", value))
            alter = records_pb2.AlterConfigsCommand(
                resource=ConfigResource(type=ConfigResource.TOPIC, name=name), set={"retention.ms": value}
            )
            self._propose(MetadataCommand(alter_configs=alter))

    def _elect_preferred(self) -> None:
        """Not part of the history: no client reads it."""
        image = self.simulation.invariants.truth
        keys = [(topic_id, each.partition) for topic_id, topic in image.topics.items() for each in topic.partitions]
        chosen = self._random.sample(sorted(keys), min(len(keys), 6))
        refs = [records_pb2.PartitionRef(topic_id=topic_id, partition=number) for topic_id, number in chosen]
        elect = ElectLeadersCommand(partitions=refs, type=ElectLeadersCommand.PREFERRED)
        self._requester.propose(MetadataCommand(elect_leaders=elect), lambda answer: self._think())

    def _begin(self, name: str, request: object) -> None:
        self.open = (name, self.simulation.scheduler.now_s, request)

    def _propose(self, command: MetadataCommand) -> None:
        self._requester.propose(command, lambda answer: self._committed(answer))

    def _committed(self, answer: Committed) -> None:
        self._done(answer_of(answer.outcome))

    def _done(self, answer: object) -> None:
        assert self.open is not None
        name, invoked_at, request = self.open
        self.open = None
        now_s = self.simulation.scheduler.now_s
        self.history.append((name, Operation(self.number, invoked_at, now_s, request, answer)))
        self._think()

    def _think(self) -> None:
        self._process.after(self._random.uniform(*THINK_S) * self.simulation.think_factor, self._next)


class Bursts:
    """An impatient client: many commands at once to every node that takes itself for the controller.

    So a deposed controller gets more uncommitted entries than the next one commits in the meantime.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = simulation.random
        self._number = 0
        self._mean_s = self._random.choice((0.1, 0.3, 1.0))

    def start(self) -> None:
        """Begin; the bursts end by themselves."""
        self._simulation.scheduler.after(1.0, self._next)

    def _next(self) -> None:
        if self._simulation.winding_down:
            return
        for node_id in self._simulation.voters:
            voter = self._simulation.voter_on(node_id)
            if voter is not None and self._random.random() < 0.7:
                voter.process.run(self.propose, voter, self._random.choice((1, 1, 3, 10)))
        self._simulation.scheduler.after(self._random.expovariate(1 / self._mean_s), self._next)

    def propose(self, voter: Voter, count: int) -> None:
        """Propose so many commands to one node."""
        for _ in range(count if voter.node.active else 0):
            self._number += 1
            alter = records_pb2.AlterConfigsCommand(
                resource=ConfigResource(type=ConfigResource.TOPIC, name=f"topic-{self._number % TOPICS}"),
                set={"max.message.bytes": str(1_000 + self._number)},
            )
            voter.propose(MetadataCommand(alter_configs=alter), lambda answer: None)
