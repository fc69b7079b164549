"""The application behind the api listener: which handler answers which route."""

from aiohttp import web

from pdnode.api.codec import TextCodec
from pdnode.api.errors import errors_middleware, mark_response
from pdnode.api.limits import Timeouts
from pdnode.api.openai import OpenAiRoutes
from pdnode.api.probes import Probes
from pdnode.api.service import Service
from pdnode.config import ApiConfig
from pdnode.obs.metrics import Metrics

_DEFAULT_TIMEOUTS = Timeouts()


def build_app(
    service: Service,
    codec: TextCodec,
    config: ApiConfig,
    metrics: Metrics,
    timeouts: Timeouts = _DEFAULT_TIMEOUTS,
) -> web.Application:
    """All routes of the api listener. Serve it with `api.listener.ApiListener`, which cancels the
    handler of a client that left and bounds connections and headers.
    """
    app = web.Application(middlewares=[errors_middleware], client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(mark_response)
    openai = OpenAiRoutes(
        service, codec, metrics, max_body_bytes=config.max_body_bytes, timeouts=timeouts
    )
    app.on_cleanup.append(openai.close)
    probes = Probes(service, metrics)
    app.router.add_get("/v1/models", openai.models)
    app.router.add_post("/v1/completions", openai.completions)
    app.router.add_post("/v1/chat/completions", openai.chat)
    app.router.add_get("/health", probes.health)
    app.router.add_get("/readyz", probes.readyz)
    app.router.add_get("/metrics", probes.metrics)
    app.router.add_get("/version", probes.version)
    return app
