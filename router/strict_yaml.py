"""YAML whose mappings have each key once, as YAML wants it; PyYAML alone keeps the last one and says nothing."""

from __future__ import annotations

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Gateways read the file of keys while they serve, and the other loader takes ten times as long."""


class DuplicateKey(yaml.MarkedYAMLError):
    """A key that its mapping has already. It is not named: what is meant to be a value may be a secret."""


class _Loader(_Base):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != _MERGE and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise DuplicateKey(problem="its mapping has this key already", problem_mark=key.start_mark)
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def load(text: str) -> Any:
    """What a document says. Raises yaml.YAMLError; tags that make objects are refused."""
    return yaml.load(text, Loader=_Loader)
