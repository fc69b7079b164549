"""The application behind the api listener: which handler answers which route."""

from collections.abc import Callable, Sequence

from aiohttp import web

from pdnode.api.codec import TextCodec
from pdnode.api.errors import errors_middleware, mark_response
from pdnode.api.keys import ApiKeys
from pdnode.api.limits import Timeouts
from pdnode.api.openai import OpenAiRoutes
from pdnode.api.probes import Probes
from pdnode.api.service import Service
from pdnode.config import ApiConfig
from pdnode.obs.metrics import Metrics
from pdnode.obs.snapshot import Warning

_DEFAULT_TIMEOUTS = Timeouts()
_OPENAI = web.AppKey("openai", OpenAiRoutes)
_KEYS = web.AppKey("keys", ApiKeys)


def build_app(
    service: Service,
    codec: TextCodec,
    config: ApiConfig,
    metrics: Metrics,
    timeouts: Timeouts = _DEFAULT_TIMEOUTS,
    *,
    warnings: Callable[[], Sequence[Warning]],
) -> web.Application:
    """All routes of the api listener. `warnings` are what /readyz shows.

    Serve it with `api.listener.ApiListener`, which cancels the handler of a client that left and
    bounds connections and headers.
    """
    keys = ApiKeys(config.keys)
    app = web.Application(middlewares=[errors_middleware, keys.middleware])
    app[_KEYS] = keys
    app.on_response_prepare.append(mark_response)
    openai = OpenAiRoutes(
        service, codec, metrics, max_body_bytes=config.max_body_bytes, timeouts=timeouts
    )
    app[_OPENAI] = openai
    app.on_cleanup.append(openai.close)
    probes = Probes(service, metrics, warnings)
    app.router.add_get("/v1/models", openai.models)
    app.router.add_post("/v1/completions", openai.completions)
    app.router.add_post("/v1/chat/completions", openai.chat)
    app.router.add_get("/health", probes.health)
    app.router.add_get("/readyz", probes.readyz)
    app.router.add_get("/metrics", probes.metrics)
    app.router.add_get("/version", probes.version)
    return app


def reload_app(app: web.Application, config: ApiConfig) -> None:
    """New limits and keys, for requests that come from now on."""
    app[_KEYS].replace(config.keys)
    app[_OPENAI].max_body_bytes = config.max_body_bytes
