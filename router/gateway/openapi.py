"""The OpenAPI document. Routes read raw bodies, for bounds and messages of their own, so each names its model here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from router.gateway.errors import ErrorAnswer

_COMPONENTS = "#/components/schemas/"
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorAnswer, "description": "The request could not be served."},
}
"""For `responses=` of a router."""
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""A server-sent event. A `schema` would be of the whole stream, or of an event, depending on who reads it."""


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra=` of a route: its body is `model`. With a field `stream` it may answer with events, too."""
    name = model.__name__
    # Models of different bodies may have the same name: a chat's message is not that of another API.
    schema = model.model_json_schema(ref_template=f"{_COMPONENTS}{name}.{{model}}")
    parts = {f"{name}.{part}": one for part, one in schema.pop("$defs", {}).items()}
    whole = {"$ref": f"{_COMPONENTS}{name}", "$defs": {name: schema, **parts}}
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in model.model_fields:
        answers["text/event-stream"] = {"itemSchema": _EVENT}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": whole}}},
        "responses": {"200": {"content": answers}},
    }


def document(app: FastAPI) -> dict[str, Any]:
    """The document of all routes, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = made.setdefault("components", {}).setdefault("schemas", {})
        for operation in (one for path in made["paths"].values() for one in path.values()):
            for content in operation.get("requestBody", {}).get("content", {}).values():
                components.update(content["schema"].pop("$defs", {}))
        app.openapi_schema = made
    return app.openapi_schema
