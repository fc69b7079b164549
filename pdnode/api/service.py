"""What the HTTP routes need of the daemon: a service that turns tokens into tokens.

Text (templates, tokenizing, detokenizing, stop strings) is the API's; scheduling, peers and pages
are the service's. The daemon builds the service; tests give a small one of their own.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from pdnode.core.request import Request, TokenEvent


class Generation(Protocol):
    """One admitted request."""

    @property
    def prefill(self) -> str:
        """Name of the peer that computed the prompt, or "local". Final with the first token."""

    def events(self) -> AsyncIterator[TokenEvent]:
        """Tokens in order; ends after the one with `finish`. Raises errors.Cause on failure."""

    def cancel(self, reason: str) -> None:
        """The client left, or a stop string was found. Idempotent; `events` ends without error."""


class Service(Protocol):
    @property
    def model_name(self) -> str: ...
    @property
    def context_tokens(self) -> int:
        """Longest sequence: the smaller of the model's and what the usable peers take."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV pool holds in all; a longer request can never fit."""

    @property
    def vocabulary(self) -> int: ...
    def not_ready(self) -> list[str]:
        """Why no work should be sent now (loading, draining, no prefill …); empty when ready."""

    def alive(self) -> bool: ...
    def role(self) -> str: ...
    def may_generate(self) -> bool:
        """False on a prefill node: the generation routes answer 404 with a text that says so."""

    async def submit(self, request: Request) -> Generation:
        """Admit or refuse (errors.QueueFull, Unavailable, BadRequest). What fails between here and
        the first token comes out of `Generation.events`, so the HTTP status waits for that."""
