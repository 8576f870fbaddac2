"""A file is the block asked for, exactly, or it is a miss."""

import os
import threading
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.workers.blocks import LAYOUT, OTHER_LAYOUT, chain, payload
from workers.kv.blockfile import (
    BadFile,
    Block,
    child_digest,
    read,
    read_header,
    root_digest,
    verify,
    write,
)

BLOCK = chain(3, salt=b"tenant")[2]
PAYLOAD = payload(BLOCK, 1000)
FIXED = 80  # bytes from the magic to the payload's checksum
HEADER = FIXED + len(LAYOUT) + len(BLOCK.salt) + len(BLOCK.tokens) + 16
STRUCTURE = [0, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, FIXED, FIXED + 32, FIXED + 38, FIXED + 102, HEADER, HEADER + 1]


def name(block: Block) -> str:
    return f"{block.digest.hex()}.kv"


def load(path: Path, block: Block, size: int = len(PAYLOAD), fingerprint: str = LAYOUT) -> bytes:
    out = bytearray(size)
    read(path, fingerprint, block, memoryview(out))
    return bytes(out)


def bad(path: Path) -> None:
    for check in (lambda: load(path, BLOCK), lambda: verify(path, LAYOUT)):
        with pytest.raises(BadFile):
            check()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / name(BLOCK)
    write(path, LAYOUT, BLOCK, PAYLOAD)
    return path


def test_what_was_written_is_read(file: Path) -> None:
    assert load(file, BLOCK) == PAYLOAD
    assert read_header(file, LAYOUT) == BLOCK
    assert verify(file, LAYOUT) == len(PAYLOAD)
    assert file.stat().st_size == HEADER + len(PAYLOAD)
    assert os.listdir(file.parent) == [file.name]


def test_digests_name_prefixes_and_are_the_same_in_every_process() -> None:
    assert root_digest(LAYOUT, b"tenant").hex() == "08caad7c6565a80bc775e8138bf9d6f1"
    assert child_digest(bytes(16), b"\1\0\0\0").hex() == "a84859b3eafef501122586b70d44719e"
    names = [root_digest(LAYOUT, b""), root_digest(OTHER_LAYOUT, b""), root_digest(LAYOUT, b"x")]
    names += [root_digest(LAYOUT + "x", b""), *(block.digest for block in chain(3) + chain(3, salt=b"x"))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("length", [*STRUCTURE, HEADER + 999])
def test_a_truncated_file_is_bad(file: Path, length: int) -> None:
    os.truncate(file, length)
    bad(file)
    with pytest.raises(BadFile):
        read_header(file, LAYOUT)


@pytest.mark.parametrize("length", [1, 16, 1000])
def test_a_longer_file_is_bad(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes() + bytes(length))
    bad(file)
    with pytest.raises(BadFile):
        read_header(file, LAYOUT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(region=st.integers(0, len(STRUCTURE) - 1), share=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_is_found(file: Path, region: int, share: float, flip: int) -> None:
    """In every field of the header, and in the payload."""
    begin, end = ([*STRUCTURE, HEADER + len(PAYLOAD)])[region : region + 2]
    at = begin + int(share * (end - begin))
    good = file.read_bytes()
    file.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
    bad(file)
    if at < HEADER:
        with pytest.raises(BadFile):
            read_header(file, LAYOUT)
    file.write_bytes(good)
    assert load(file, BLOCK) == PAYLOAD


def test_swapped_files_are_bad(file: Path) -> None:
    sibling = chain(1, first=7)[0]
    other = file.with_name(name(sibling))
    write(other, LAYOUT, sibling, payload(sibling, 1000))
    spare = file.with_name("spare")
    file.rename(spare)
    other.rename(file)
    spare.rename(other)
    bad(file)
    for path in (file, other):
        with pytest.raises(BadFile):
            read_header(path, LAYOUT)


@pytest.mark.parametrize("field", [one.name for one in fields(Block)])
def test_a_block_that_differs_in_any_field_is_not_in_it(file: Path, field: str) -> None:
    value = getattr(BLOCK, field)
    other = replace(BLOCK, **{field: value + 1 if isinstance(value, int) else value[:-1] + b"?"})
    with pytest.raises(BadFile):
        load(file, other)


def test_a_block_of_another_length_or_layout_is_not_in_it(file: Path) -> None:
    for size in (len(PAYLOAD) - 1, len(PAYLOAD) + 1, 0):
        with pytest.raises(BadFile):
            load(file, BLOCK, size)
    with pytest.raises(BadFile):
        load(file, BLOCK, fingerprint=OTHER_LAYOUT)
    with pytest.raises(BadFile, match="another model"):
        read_header(file, OTHER_LAYOUT)


def test_digests_have_to_be_right(tmp_path: Path) -> None:
    """A header that is consistent, but whose digests were not made from its tokens and salt."""
    for block in (replace(BLOCK, tokens=BLOCK.tokens[:-1] + b"?"), replace(chain(1)[0], salt=b"other")):
        path = tmp_path / name(block)
        write(path, LAYOUT, block, PAYLOAD)
        with pytest.raises(BadFile, match="digests"):
            read_header(path, LAYOUT)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(5000), b"HWkvBLK\0\1\0" + b"\xff" * 5000])
def test_a_foreign_file_is_bad(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    bad(file)


def test_what_is_no_file_is_an_error_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.kv"
    os.mkfifo(pipe)
    bad(pipe)
    with pytest.raises(IsADirectoryError):
        read_header(tmp_path, LAYOUT)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.kv", BLOCK)


def test_a_salt_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="longer"):
        write(tmp_path / "x.kv", LAYOUT, replace(BLOCK, salt=bytes(5000)), PAYLOAD)
    assert not list(tmp_path.iterdir())


def test_a_file_is_visible_only_when_it_is_complete(tmp_path: Path) -> None:
    """One thread reads all the time while another one writes."""
    path, enough = tmp_path / name(BLOCK), threading.Event()
    large, seen = payload(BLOCK, 300_000), 0

    def rewrite() -> None:
        while not enough.is_set():
            path.unlink(missing_ok=True)
            write(path, LAYOUT, BLOCK, large)

    writer = threading.Thread(target=rewrite)
    writer.start()
    until = time.monotonic() + 30
    try:
        while seen < 20 and time.monotonic() < until:
            with suppress(FileNotFoundError):
                assert load(path, BLOCK, len(large)) == large
                seen += 1
    finally:
        enough.set()
        writer.join()
    assert seen == 20
