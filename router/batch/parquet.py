"""Parquet files as batch files: their rows become lines of a temporary file, once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from router.batch.errors import BatchError
from router.batch.lines import FIELDS

SUFFIX = ".parquet"
ROWS_AT_ONCE = 256
NEEDED = ("custom_id", "url", "body")
"""Columns; `method` may be missing, since there is only one."""


def as_lines(path: Path) -> IO[bytes]:
    """A temporary file with a line for each row, in their order; it has no name, so nothing is left of it however the
    process ends. Raises BatchError for what cannot be read, and for columns that are not those of a batch."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # who asked for it closes it
    try:
        for number, row in enumerate(_rows(path), 1):
            try:
                file.write(_line(row))
            except TypeError as error:
                raise BatchError(f"{path}: row {number}: body: {error}") from None
        file.flush()
    except OSError as error:
        file.close()
        raise BatchError(f"{path}: cannot be made JSON lines in {tempfile.gettempdir()}: {error.strerror}") from None
    except BaseException:
        file.close()
        raise
    return file


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Some at a time: of a row group only what is looked at is in memory."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise BatchError(f"{path}: Parquet needs pyarrow: pip install 'headwater[parquet]'") from None
    try:
        with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as table:
            _check(path, table.schema_arrow, arrow.types)
            for some in table.iter_batches(ROWS_AT_ONCE):
                yield from some.to_pylist(maps_as_pydicts="strict")
    except (arrow.ArrowException, OSError, KeyError) as error:  # KeyError: a map has a key twice
        raise BatchError(f"{path}: cannot be read as Parquet: {' '.join(str(error).split())}") from None


def _check(path: Path, schema: Any, types: Any) -> None:
    """Raises BatchError where a column is missing, unknown, or of another type."""
    for name in NEEDED:
        if name not in schema.names:
            raise BatchError(f"{path}: has no column {name!r}: a batch has {', '.join(FIELDS)}")
    for field in schema:
        if field.name not in FIELDS:
            raise BatchError(f"{path}: column {field.name!r}: only {', '.join(FIELDS)} are known in a batch")
        text = types.is_string(field.type) or types.is_large_string(field.type)
        if not text and not (field.name == "body" and (types.is_struct(field.type) or types.is_map(field.type))):
            kinds = "a struct, or a string of JSON" if field.name == "body" else "a string"
            raise BatchError(f"{path}: column {field.name!r}: must be {kinds}, got {field.type}")


def _line(row: dict[str, Any]) -> bytes:
    """A row as a line of a batch file. One that is no request makes a line that is none, which says why."""
    body = row["body"]
    if isinstance(body, str):
        with suppress(ValueError, RecursionError):  # then it is a string, which is no body
            body = json.loads(body)
    else:
        body = _without_nulls(body)
    line = {**row, "method": row.get("method") or "POST", "body": body}
    return json.dumps(line).encode() + b"\n"


def _without_nulls(value: Any) -> Any:
    """In a column of structs all have the fields of all: those of others are null."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
