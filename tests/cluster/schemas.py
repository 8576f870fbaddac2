"""JSON schemas drawn by a seed: what people write, nested, and now and then what no grammar can express."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ["id", "name", "kind", "size", "place", "colour", "parts", "note", "größe", 'a "b"']
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][a-z]+-[0-9]{2}$", "^(red|green|blue)( dark)?$", r"^\d{3}\.\d$", "^x?y+$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname"]
BEYOND: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ("not", {"not": {"type": "string"}}),
    ("contains", {"type": "array", "contains": {"type": "integer"}}),
    ("if", {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("look-around", {"type": "string", "pattern": "^(?!no)[a-z]+$"}),
    ("format", {"type": "string", "format": "iri-reference-of-mine"}),
]
"""What llguidance does not do, and the word that its refusal has to have."""


class Drawn:
    """One schema. `beyond` are the words of what is in it and cannot be served."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.beyond: list[str] = []
        self._random = random.Random(seed)
        self._defs: dict[str, Schema] = {}
        self.schema = self._object(3)
        if self._defs:
            self.schema["$defs"] = self._defs

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self._string,
            self._string,
            self._integer,
            self._number,
            self._enum,
            self._const,
            self._nullable,
            lambda: {"type": self._random.choice(["boolean", "null"])},
        ]
        inner: list[Callable[[int], Schema]] = [self._object, self._array, self._union, self._reference, self._all]
        if self._random.random() < 0.03:
            word, schema = self._random.choice(BEYOND)
            self.beyond.append(word)
            return dict(schema)
        if depth <= 0 or self._random.random() < 0.55:
            return self._random.choice(leaves)()
        return self._random.choice(inner)(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.8]
        schema["additionalProperties"] = False
        if self._random.random() < 0.1:
            schema["additionalProperties"] = {"type": "integer"}
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(depth - 1), "maxItems": self._random.randint(1, 3)}
        if self._random.random() < 0.5:
            schema["minItems"] = self._random.randint(0, schema["maxItems"])
        if self._random.random() < 0.2:
            schema["prefixItems"] = [self._any(0), self._any(0)]
            schema["maxItems"] = 3
        return schema

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            return {"oneOf": [{"type": "string", "maxLength": 5}, self._integer(), {"type": "null"}]}
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randint(2, 3))]}

    def _all(self, depth: int) -> Schema:
        low = self._random.randint(-50, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 30}]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}
        if self._random.random() < 0.3:  # a tree
            child = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
            properties = {"value": self._any(0), "next": child}
            self._defs[name] = {
                "type": "object",
                "properties": properties,
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        else:
            self._defs[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _string(self) -> Schema:
        kind = self._random.random()
        if kind < 0.3:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if kind < 0.5:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        most = self._random.randint(1, 15)
        schema: Schema = {"type": "string", "maxLength": most}
        if self._random.random() < 0.5:
            schema["minLength"] = self._random.randint(0, most)
        return schema

    def _integer(self) -> Schema:
        schema: Schema = {"type": "integer"}
        low = self._random.randint(-2000, 2000)
        schema[self._random.choice(["minimum", "exclusiveMinimum"])] = low
        schema[self._random.choice(["maximum", "exclusiveMaximum"])] = low + self._random.randint(20, 5000)
        if self._random.random() < 0.2:
            schema["multipleOf"] = self._random.choice([2, 5, 7, 10])
        return schema

    def _number(self) -> Schema:
        low = round(self._random.uniform(-100, 100), 2)
        most = round(low + self._random.uniform(1, 90), 2)
        return {"type": "number", "minimum": low, self._random.choice(["maximum", "exclusiveMaximum"]): most}

    def _enum(self) -> Schema:
        values = ["north", "south", 'with "quotes"', "größe\n", 7, -1.5, True, None, {"a": [1]}, "x" * 30]
        return {"enum": self._random.sample(values, self._random.randint(1, 6))}

    def _const(self) -> Schema:
        return {"const": self._random.choice(["fixed", 12, False, None, ["a", {"b": 2}]])}

    def _nullable(self) -> Schema:
        return {"type": ["string", "null"], "maxLength": self._random.randint(1, 10)}
