"""Schemas of Kubernetes and of KubeRay's objects, as validators."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

# Its schemas are megabytes, and it reads them anew for each object.
kubernetes_validate.utils.schema_contents = lru_cache(None)(kubernetes_validate.utils.schema_contents)
_valid: set[tuple[str, str]] = set()


def check(one: dict[str, Any], version: str) -> None:
    """Raise ValidationError unless a built-in object is as that version of Kubernetes wants it."""
    if (key := (json.dumps(one, sort_keys=True), version)) not in _valid:
        kubernetes_validate.validate(one, version, strict=True)
        _valid.add(key)


@lru_cache(None)
def resource_validator(file: Path) -> jsonschema.Draft202012Validator:
    """Of a custom resource, from its definition."""
    definition = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema = _strict(version["schema"]["openAPIV3Schema"])
    return jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """A structural schema as the API server reads it: unknown keys are refused, and what has a default may lack."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    properties = schema.get("properties")
    if isinstance(properties, dict) and schema.get("type") == "object":
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
        if "required" in schema:
            schema["required"] = [name for name in schema["required"] if "default" not in properties.get(name, {})]
    return schema


def without_nulls(value: Any) -> Any:
    """A null says nothing."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else copy.copy(value)
