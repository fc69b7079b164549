"""Liveness, readiness, metrics and version: what supervisors, routers and scrapers ask."""

from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from pdnode import __version__
from pdnode.api.service import Service
from pdnode.obs.metrics import Metrics
from pdnode.obs.snapshot import Warning


class Status(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str
    role: str
    model: str


class Probes:
    def __init__(
        self, service: Service, metrics: Metrics, warnings: Callable[[], Sequence[Warning]]
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._warnings = warnings

    async def health(self, _request: web.Request) -> web.Response:
        """Liveness only: 200 while loading and draining too, or a supervisor kills a node that
        is finishing its work.
        """
        if self._service.alive():
            return _json(Status("alive"))
        return _json(Status("the engine is dead"), status=503)

    async def readyz(self, _request: web.Request) -> web.Response:
        """May work be sent? 503 under a warning that says not. The body lists all warnings."""
        shown = self._warnings()
        unready = any(one.affects_readiness for one in shown)
        return _json(shown, status=503 if unready else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def version(self, _request: web.Request) -> web.Response:
        service = self._service
        return _json(Version(__version__, service.role(), service.model_name))


def _json(value: msgspec.Struct | Sequence[Warning], *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )
