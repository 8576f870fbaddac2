"""Routes of the dashboard: the page, which anybody may load, and what it shows, for those with a key."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from router.gateway import accounts
from router.gateway.accounts import Keyring
from router.gateway.dashboard.cluster import Cluster
from router.gateway.dashboard.viewer import Viewer
from router.gateway.errors import ApiError

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def files() -> dict[str, bytes]:
    """The files of the page by name."""
    return {one.name: one.read_bytes() for one in PAGE.iterdir() if one.suffix in TYPES}


def routes(cluster: Cluster, keyring: Keyring) -> APIRouter:
    """Not in the description of the API: what the page asks for is between it and this gateway."""
    made = APIRouter(prefix="/dashboard", include_in_schema=False)
    _page_routes(made)
    _data_routes(made, cluster, keyring)
    return made


def _page_routes(made: APIRouter) -> None:
    def file(name: str) -> Response:
        if (content := files().get(name)) is None:
            raise ApiError(404, f"the dashboard has no file {name[:64]!r}")
        kind = f"{TYPES[Path(name).suffix]}; charset=utf-8"
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    @made.get("")
    async def page() -> Response:
        return file("index.html")

    @made.get("/{name}")
    async def part(name: str) -> Response:
        return file(name)


def _data_routes(made: APIRouter, cluster: Cluster, keyring: Keyring) -> None:
    def viewer() -> Viewer:
        return Viewer.of(accounts.current.get(), keyring)

    @made.get("/api/cluster")
    async def picture(since: int = Query(0, ge=0)) -> Response:
        who = viewer()
        return _data(await cluster.picture(who, since) | {"tenant": who.tenant})

    @made.get("/api/ring")
    async def ring() -> Response:
        return _data(cluster.ring())

    @made.get("/api/requests")
    async def requests() -> Response:
        return _data({"requests": await cluster.requests(viewer())})

    @made.get("/api/requests/{gateway}/{number}")
    async def request(gateway: str, number: int) -> Response:
        return _data(await cluster.request(viewer(), gateway, number))

    @made.get("/api/trees/{worker}")
    async def tree(worker: str, path: str = "") -> Response:
        return _data(await cluster.outline(viewer(), worker, path))


def _data(content: dict[str, Any]) -> Response:
    return JSONResponse(content, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
