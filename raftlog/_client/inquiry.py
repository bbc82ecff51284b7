"""Asks brokers for metadata, and waits for none that is silent while another one may answer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog.errors import AuthorizationError, RaftlogError, RequestTimedOut, RetriableError, from_wire
from raftlog.v1 import metadata_pb2, metadata_pb2_grpc

logger = logging.getLogger(__name__)

HEDGE_S: Final = 0.2
"""A broker that has not answered for so long is silent: the next one is asked as well. Answers take milliseconds."""
_ADDRESS_TIMEOUT_S: Final = 3.0
"""How long one broker may take at all."""

_Answer = asyncio.Task[metadata_pb2.MetadataResponse]


class NobodyAnswers(Exception):
    """All were asked; `reasons` has what each of them said, or did not."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Inquiry:
    """One question to whoever answers first. Beside, it learns who is silent.

    A broker that owes an answer for `HEDGE_S` is silent until it answers, or its connection breaks: a frozen process
    looks like this, its connections are open. It is asked again with later questions and never waited for; what it was
    asked stays open when another broker was quicker, so that its first sign of life is noticed.
    `on_change` is called whenever a broker falls silent, or is not any more.
    """

    def __init__(self, connections: Connections, request_timeout_s: float, on_change: Callable[[], None]) -> None:
        self._silent: dict[str, float] = {}
        self._connections = connections
        self._timeout_s = min(_ADDRESS_TIMEOUT_S, request_timeout_s)
        self._on_change = on_change
        self._open: dict[str, _Answer] = {}
        """By address: a question that nobody waits for any more."""

    def silent_since(self, address: str) -> float | None:
        """Return the loop's time at which a silent broker was asked first; None: it is not silent."""
        return self._silent.get(address)

    async def ask(
        self,
        addresses: Iterable[str],
        request: metadata_pb2.MetadataRequest,
        *,
        probes: Collection[str],
        good_enough: Callable[[metadata_pb2.MetadataResponse], bool],
    ) -> metadata_pb2.MetadataResponse:
        """Return the first answer that is `good_enough`, or another one if there is none.

        `probes` are asked beside the others, to see whether they live: what they say counts only if nobody else says
        anything, since a leader may be cut off from the other brokers and not know what has happened.

        Raises:
            AuthorizationError, InvalidRequestError: a broker refuses the question.
            NobodyAnswers: nobody is left to ask.
        """
        loop = asyncio.get_running_loop()
        wanted = list(dict.fromkeys(addresses))
        aside = dict.fromkeys(address for address in wanted if address in self._silent or address in probes)
        waiting = deque(address for address in wanted if address not in aside)
        asked = {self._start(each, request): each for each in aside if each not in self._open or not waiting}
        reasons: list[str] = []
        second_best: metadata_pb2.MetadataResponse | None = None
        next_at_s = loop.time()
        try:
            while True:
                if waiting and loop.time() >= next_at_s:
                    address = waiting.popleft()
                    asked[self._start(address, request)] = address
                    next_at_s = loop.time() + HEDGE_S
                if not waiting and aside.keys() >= set(asked.values()) and second_best is not None:
                    return second_best
                if not asked:
                    raise NobodyAnswers(reasons)
                limit_s = max(0.0, next_at_s - loop.time()) if waiting else None
                done, _ = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for answer in [each for each in asked if each in done]:
                    address = asked.pop(answer)
                    response = self._outcome(answer, address, reasons)
                    if address not in aside:
                        if response is not None and good_enough(response):
                            return response
                        next_at_s = loop.time()
                    second_best = second_best or response
        finally:
            self._leave_open(asked)

    def _start(self, address: str, request: metadata_pb2.MetadataRequest) -> _Answer:
        before = self._open.pop(address, None)
        if before is not None:
            before.cancel()
        return asyncio.get_running_loop().create_task(self._ask_one(address, request))

    async def _ask_one(self, address: str, request: metadata_pb2.MetadataRequest) -> metadata_pb2.MetadataResponse:
        loop = asyncio.get_running_loop()
        late = loop.call_later(HEDGE_S, self._falls_silent, address, loop.time())
        stub = metadata_pb2_grpc.MetadataStub(self._connections.channel(address))
        try:
            response: metadata_pb2.MetadataResponse = await stub.Get(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            reason = from_grpc(error, address)
            if not isinstance(reason, RequestTimedOut):
                self._is_heard(address)  # whatever is the matter, its other streams meet it as well
            raise reason from None
        finally:
            late.cancel()
        self._is_heard(address)
        return response

    def _falls_silent(self, address: str, asked_at_s: float) -> None:
        if address not in self._silent:
            self._silent[address] = asked_at_s
            logger.debug("no answer from %s yet", address)
            self._on_change()

    def _is_heard(self, address: str) -> None:
        if self._silent.pop(address, None) is not None:
            logger.debug("%s is not silent any more", address)
            self._on_change()

    @staticmethod
    def _outcome(answer: _Answer, address: str, reasons: list[str]) -> metadata_pb2.MetadataResponse | None:
        """Return what a broker answered, None when the next one is to be asked."""
        try:
            response = answer.result()
        except AuthorizationError:
            raise
        except RaftlogError as error:
            reasons.append(str(error))
            return None
        if not response.error.code:
            return response
        refusal = from_wire(response.error)
        if not isinstance(refusal, RetriableError):
            raise refusal
        reasons.append(f"{address}: {refusal}")
        return None

    def _leave_open(self, asked: dict[_Answer, str]) -> None:
        for answer, address in asked.items():
            self._open[address] = answer
            answer.add_done_callback(partial(self._closed, address))

    def _closed(self, address: str, answer: _Answer) -> None:
        if self._open.get(address) is answer:
            del self._open[address]
        if not answer.cancelled():
            answer.exception()  # nobody waits for it

    async def close(self) -> None:
        """Ask no more."""
        left = list(self._open.values())
        for answer in left:
            answer.cancel()
        await asyncio.gather(*left, return_exceptions=True)
