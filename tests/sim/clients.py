"""The clients: every request ends exactly once, and no answer has a wrong token."""

from dataclasses import dataclass, field

from pdnode.core.request import Request
from pdnode.daemon.flight import Flight
from pdnode.errors import Cause
from tests.sim.kernel import promise
from tests.sim.memory import extend, mark_of
from tests.sim.process import Process
from tests.sim.worker import token_after


@dataclass(slots=True, eq=False)
class Client:
    """One request, as whoever sent it sees it."""

    request: Request
    process: Process
    flight: Flight | None = None
    got: list[int] = field(default_factory=list)
    outcome: str | None = None  # a finish word, the code of a Cause, "crashed"
    leaves: bool = False
    begun_at: float = 0.0  # of the kernel
    ended_at: float = 0.0

    def end(self, outcome: str) -> None:
        promise(self.outcome is None, f"a request ended twice: {self.outcome}, {outcome}")
        self.outcome = outcome
        self.ended_at = self.process.cluster.kernel.now

    def leave(self) -> None:
        """The client hangs up."""
        self.leaves = True
        if self.flight is not None:
            self.flight.cancel("cancelled")

    async def run(self) -> None:
        try:
            self.flight = await self.process.service.submit(self.request)
            if self.leaves:
                self.flight.cancel("cancelled")
            async for event in self.flight.events():
                self._take(event.token)
                if event.finish is not None:
                    promise(len(self.got) == self.request.max_tokens, "an answer too short")
                    self.end(event.finish)
            if self.outcome is None:
                promise(self.leaves, "an answer ended without an end")
                self.end("cancelled")
        except Cause as cause:
            self.end(cause.code)

    def _take(self, token: int) -> None:
        mark = mark_of([*self.request.prompt, *self.got])
        promise(token == token_after(mark), "a wrong token")
        self.got.append(token)


def prompt_of(number: int, length: int, vocabulary: int) -> tuple[int, ...]:
    """All prompts differ, in every page."""
    mark = extend(number, length)
    found = []
    for _ in range(length):
        mark = extend(mark, number)
        found.append(mark % vocabulary)
    return tuple(found)
