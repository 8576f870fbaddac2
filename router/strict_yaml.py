"""YAML whose mappings have each key once, as YAML wants it; PyYAML alone keeps the last one and says nothing."""

from __future__ import annotations

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Gateways read the file of keys while they serve, and the other loader takes ten times as long."""


class DuplicateKey(yaml.MarkedYAMLError):
    """A key that its mapping has already. It is not named: what is meant to be a value may be a secret."""


def load(text: str) -> Any:
    """What a document says. Raises yaml.YAMLError; tags that make objects are refused."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _check(node, set())
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _check(node: Any, seen: set[int]) -> None:
    """Before anything is made of it: to merge mappings changes nodes."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            _check(one, seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in keys:
                    raise DuplicateKey(problem="its mapping has this key already", problem_mark=key.start_mark)
                keys.add(key.value)
            _check(value, seen)
