"""API keys: who may use /v1 where `[api] keys_credential` names any."""

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import web

from pdnode.api.errors import Handler
from pdnode.errors import Unauthorized

GUARDED = "/v1/"
"""Probes and metrics stay open: supervisors and scrapers have no key."""


class ApiKeys:
    """Keeps digests only, so that no key is in a trace. `replace` takes effect at once."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._digests: tuple[bytes, ...] = ()
        self.replace(keys)

    def replace(self, keys: Sequence[bytes]) -> None:
        """No keys: everybody may."""
        self._digests = tuple(hashlib.sha256(key).digest() for key in keys)

    def check(self, authorization: str) -> None:
        """Raises Unauthorized unless the header carries one of the keys."""
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        asked = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = [hmac.compare_digest(asked, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            what = "no API key" if not authorization else "this API key is not known"
            raise Unauthorized(f"{what}: send Authorization: Bearer KEY")

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Before anything of the body is read."""
        if request.path.startswith(GUARDED):
            self.check(request.headers.get("Authorization", ""))
        return await handler(request)
