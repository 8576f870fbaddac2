"""Unions whose members say in `type` what they are."""

from __future__ import annotations

from typing import Any

from pydantic import Discriminator


def by_type(*types: str, default: str | None = None) -> Discriminator:
    """Chooses the member by `type`, which may be missing where there is a default. Members carry `Tag("<type>")`: with
    the brackets a tag is no field's name, so that an error's location shows which parts of it are in the body."""

    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if isinstance(kind, str) else None

    names = " or ".join(repr(one) for one in types)
    return Discriminator(tag, "unsupported_type", f"only an object whose type is {names} is supported")
