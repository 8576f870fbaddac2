"""The JSON that is followed piece by piece is the JSON that `json` reads."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from router.gateway.parsers.json_text import is_json

FRAGMENTS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"a"',
    '"',
    "\\",
    "\\u00e9",
    "\\u12",
    "0",
    "-1.5e+3",
    "01",
    "-",
    "true",
    "nul",
    " ",
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def reads(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=10).map(lambda parts: "".join(parts).strip()))
@example("[1}")
@example('{"a": [1}]')
@example('{"a": 1,}')
@example("[1,]")
@example("NaN")
def test_any_text_is_judged_as_json_judges_it(text: str) -> None:
    assert is_json(text) == reads(text)


@given(value=values, indent=st.none() | st.integers(0, 2), ascii=st.booleans())
def test_any_value_is_json(value: object, indent: int | None, ascii: bool) -> None:
    assert is_json(json.dumps(value, indent=indent, ensure_ascii=ascii))
