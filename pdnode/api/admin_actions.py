"""The actions of the admin surface: `POST /admin/v1/<action>` with a JSON object, or no body.

The answer is an ActionAnswer: status 200 where it is done, else 4xx or 5xx with the reason in
`text`. With a header `Idempotency-Key` a repeated request gets the first one's answer, and nothing
is done twice; the key of another action or body is refused with 422.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import ClassVar, NamedTuple, Protocol

import msgspec
from aiohttp import web

from pdnode.obs.snapshot import ActionAnswer

MAX_KEYS = 256
_KEY = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of an action; a subclass is one action."""

    name: ClassVar[str]


class Drain(Action, frozen=True):
    """Take no new work, tell the peers, finish what is there. The process goes on."""

    name = "drain"


class Undrain(Action, frozen=True):
    name = "undrain"


class Cancel(Action, frozen=True):
    """End a request that this node took. The id is the one of logs and snapshot, or the client's
    own x-request-id where only one open request has it.
    """

    name = "cancel"
    request_id: str


class Reload(Action, frozen=True):
    """Read the configuration file again; all changed keys must be ones that can be reloaded."""

    name = "reload"


class ChangeRole(Action, frozen=True):
    """Drain, then go on in another role: `prefill`, `decode` or `colocated`. The answer comes when
    it has begun; the snapshot shows the end. Not written to the file: the next start forgets it.
    """

    name = "role"
    role: str


class SetLogLevel(Action, frozen=True):
    """Until the next reload or start."""

    name = "log-level"
    level: str


ACTIONS: tuple[type[Action], ...] = (Drain, Undrain, Cancel, Reload, ChangeRole, SetLogLevel)


class ActionRefused(Exception):
    """The action is not done; `status` is the HTTP status, the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Actor(Protocol):
    async def act(self, action: Action) -> str:
        """Do it and say what was done, or raise ActionRefused. Never called twice at a time."""


class Said(NamedTuple):
    status: int
    answer: ActionAnswer


class RememberedAnswers:
    """The last MAX_KEYS answers by idempotency key, those on their way included."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Action, asyncio.Future[Said]]] = OrderedDict()

    async def once(self, key: str, action: Action, run: Callable[[], Awaitable[Said]]) -> Said:
        """What `run` says, or said when this key came first.

        It runs to its end even if the client that asked first leaves.
        """
        known = self._known.get(key)
        if known is None:
            task = asyncio.ensure_future(run())
            self._known[key] = (action, task)
            while len(self._known) > MAX_KEYS:
                self._known.popitem(last=False)
            return await asyncio.shield(task)
        before, answer = known
        if before != action:
            return Said(422, ActionAnswer(done=False, text=f"Idempotency-Key: used for {before}"))
        return await asyncio.shield(answer)


class Actions:
    """Handlers of the POST routes. Actions run one after the other."""

    def __init__(self, node: Actor, remembered: RememberedAnswers) -> None:
        self._node = node
        self._remembered = remembered
        self._lock = asyncio.Lock()

    def add_routes(self, app: web.Application) -> None:
        for kind in ACTIONS:
            app.router.add_post(f"/admin/v1/{kind.name}", self._handler(kind))

    def _handler(self, kind: type[Action]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            key = request.headers.get("Idempotency-Key", "")
            if key and not _KEY.fullmatch(key):
                return failed(400, "Idempotency-Key: 1 to 128 of A-Z a-z 0-9 . _ : -")
            try:
                action = msgspec.json.decode(await request.read() or b"{}", type=kind)
            except msgspec.MsgspecError as error:
                return failed(400, f"{kind.name}: {error}")
            if key:
                said = await self._remembered.once(key, action, lambda: self._run(action))
            else:
                said = await self._run(action)
            return _answered(said)

        return handle

    async def _run(self, action: Action) -> Said:
        async with self._lock:
            try:
                text = await self._node.act(action)
            except ActionRefused as refused:
                return Said(refused.status, ActionAnswer(done=False, text=str(refused)))
        return Said(200, ActionAnswer(done=True, text=text))


def failed(status: int, text: str) -> web.Response:
    """An answer in the form of the actions for anything that is not done."""
    return _answered(Said(status, ActionAnswer(done=False, text=text)))


def _answered(said: Said) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(said.answer),
        status=said.status,
        content_type="application/json",
    )
