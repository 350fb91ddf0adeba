"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from areal.tinker.api.context import ApiContext, LinkSigner
from areal.tinker.api.error_replies import add_error_handlers
from areal.tinker.api.http_settings import ApiSettings
from areal.tinker.api.metrics import ServerMetrics
from areal.tinker.api.middleware import ApiKeys, Authentication, BodyLimits, RequestLog
from areal.tinker.api.routes.checkpoints import checkpoint_routes, download_routes
from areal.tinker.api.routes.pages import page_routes
from areal.tinker.api.routes.queued import LARGE_PATHS, future_routes, sampling_routes, training_routes
from areal.tinker.api.routes.sessions import session_routes
from areal.tinker.service.service import Service

DESCRIPTION = """Training and sampling for clients of the `tinker` SDK. Most requests are answered with the id of a future, whose
result `retrieve_future` returns. A key, if the server needs one, goes into the header `X-API-Key`."""

ROUTERS = (
    session_routes,
    training_routes,
    sampling_routes,
    future_routes,
    checkpoint_routes,
    download_routes,
    page_routes,
)


def create_app(service: Service, settings: ApiSettings) -> FastAPI:
    """Return the application of a service.

    Args:
        service: the service behind the routes, which the caller starts and stops.
        settings: keys and limits.
    """
    app = FastAPI(title="areal server", description=DESCRIPTION, redirect_slashes=False)
    app.state.context = ApiContext(service, settings, LinkSigner(settings.link_lifetime_s))
    app.state.metrics = ServerMetrics()
    for router in ROUTERS:
        app.include_router(router)
    add_error_handlers(app)
    # The last one that is added sees a request first.
    limits = {"max_body_bytes": settings.max_body_bytes, "max_json_bytes": settings.max_json_bytes}
    app.add_middleware(BodyLimits, large_paths=LARGE_PATHS, **limits)
    app.add_middleware(Authentication, keys=ApiKeys(settings.users, settings.owner))
    app.add_middleware(RequestLog, metrics=app.state.metrics)
    if settings.allowed_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.allowed_hosts, www_redirect=False)
    return app
