"""`headwater cache` over directories of stores."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster import stored_blocks
from cluster.cli import app
from cluster.errors import UserError
from tests.workers.blocks import LAYOUT, OTHER_LAYOUT, chain, payload, store
from workers.kv.blockfile import Block
from workers.kv.disk import DiskStore
from workers.kv.disk_files import block_path

SECRET = b"a tenant's name"
LONG, SHORT, OTHERS = chain(5, salt=SECRET), chain(3, first=9), chain(2, first=4)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def as_json(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def refused(*arguments: str | Path) -> str:
    done = run(*arguments)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


def fill(path: Path, worker: str, blocks: list[Block], fingerprint: str = LAYOUT) -> None:
    disk = store(path, worker, fingerprint=fingerprint)
    for block in blocks:
        assert disk.write(block, payload(block))
    disk.close()


def file(path: Path, worker: str, block: Block, fingerprint: str = LAYOUT) -> Path:
    return Path(block_path(f"{path}/{worker}/{fingerprint}", block.digest))


def age(path: Path, worker: str, blocks: list[Block], seconds: float) -> None:
    for block in blocks:
        os.utime(file(path, worker, block), (time.time() - seconds,) * 2)


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    """Two workers that do not run, one with blocks of two layouts."""
    fill(tmp_path, "w0", LONG + SHORT)
    fill(tmp_path, "w0", chain(1, fingerprint=OTHER_LAYOUT), OTHER_LAYOUT)
    fill(tmp_path, "w1", OTHERS)
    age(tmp_path, "w0", SHORT, 3 * 86400)
    return tmp_path


@pytest.fixture
def running(stores: Path) -> Iterator[DiskStore]:
    disk = store(stores, "w1")
    yield disk
    disk.close()


def test_stat_counts_what_each_worker_has(stores: Path, running: DiskStore) -> None:
    found = as_json("stat", "--path", stores)["stores"]
    assert [(one["worker"], one["fingerprint"], one["blocks"], one["running"]) for one in found] == [
        ("w0", LAYOUT, 8, False),
        ("w0", OTHER_LAYOUT, 1, False),
        ("w1", LAYOUT, 2, True),
    ]
    assert found[0]["bytes"] == sum(file(stores, "w0", block).stat().st_blocks * 512 for block in LONG + SHORT)
    assert 3 * 86400 <= found[0]["oldest_s"] < 3 * 86400 + 100
    assert 0 <= found[0]["newest_s"] < 100
    text = run("stat", "--path", stores).stdout
    assert all(word in text for word in ("w0", "w1", "yes", "no", LAYOUT[:12], OTHER_LAYOUT[:12], "3 d"))
    assert max(map(len, text.splitlines())) <= 80


def test_ls_shows_the_longest_prefixes(stores: Path) -> None:
    found = as_json("ls", "--path", stores)
    assert (found["total"], found["unreadable"]) == (4, 0)
    prefixes = {one["digest"]: one for one in found["prefixes"]}
    tokens = {LONG[-1]: 80, SHORT[-1]: 48, OTHERS[-1]: 32}
    for leaf, count in tokens.items():
        assert prefixes[leaf.digest.hex()]["tokens"] == count
    assert prefixes[OTHERS[-1].digest.hex()]["worker"] == "w1"
    of_long = sum(file(stores, "w0", block).stat().st_blocks * 512 for block in LONG)
    assert prefixes[LONG[-1].digest.hex()]["bytes"] == of_long
    assert found["prefixes"][-1]["digest"] == SHORT[-1].digest.hex()
    assert 3 * 86400 <= found["prefixes"][-1]["used_s"] < 3 * 86400 + 100
    text = run("ls", "--path", stores, "--worker", "w0").stdout
    assert LONG[-1].digest.hex() in text
    assert OTHERS[-1].digest.hex() not in text
    assert max(map(len, text.splitlines())) <= 80
    limited = run("ls", "--path", stores, "--limit", "1").stdout
    assert "1 of 4 prefixes" in limited
    assert len(as_json("ls", "--path", stores, "--limit", "1")["prefixes"]) == 1


def test_nothing_tells_of_prompts(stores: Path) -> None:
    for command in ("stat", "ls", "verify"):
        for more in ((), ("--json",)):
            text = run(command, "--path", stores, *more).output
            assert SECRET.decode() not in text
            assert SECRET.hex() not in text
            assert LONG[0].tokens.hex() not in text


def test_verify_names_what_is_bad(stores: Path) -> None:
    good = as_json("verify", "--path", stores)
    assert (good["blocks"], good["bad"]) == (11, [])
    bad = [file(stores, "w0", LONG[2]), file(stores, "w1", OTHERS[0])]
    bad[0].write_bytes(bad[0].read_bytes()[:-1] + b"?")
    os.truncate(bad[1], 30)
    done = run("verify", "--path", stores)
    assert done.exit_code == 1
    assert f"{bad[0]}: its payload is damaged" in done.stdout
    assert f"{bad[1]}: it ends within its header" in done.stdout
    assert "11 blocks" in done.stdout
    assert "2 bad" in done.stdout
    done = run("verify", "--path", stores, "--json")
    assert done.exit_code == 1
    assert {one["path"] for one in json.loads(done.stdout)["bad"]} == set(map(str, bad))
    assert run("verify", "--path", stores, "--worker", "w1").exit_code == 1
    assert as_json("ls", "--path", stores)["unreadable"] == 1  # the other one has a good header


def test_clear_deletes_everything_that_is_a_block(stores: Path) -> None:
    (stores / "notes").mkdir()
    kept = [stores / "notes" / "file", stores / "w0" / "notes"]
    for path in kept:
        path.write_text("not a block")
    cleared = as_json("clear", "--path", stores)["cleared"]
    assert [(one["worker"], one["files"]) for one in cleared] == [("w0", 9), ("w1", 2)]
    assert as_json("stat", "--path", stores)["stores"] == []
    assert [path.read_text() for path in kept] == ["not a block"] * 2
    assert sorted(os.listdir(stores / "w0")) == ["lock", "notes"]
    fill(stores, "w0", LONG)


def test_clear_can_choose(stores: Path) -> None:
    assert "3 files deleted" in run("clear", "--path", stores, "--worker", "w0", "--older-than", "2d").stdout
    left = as_json("stat", "--path", stores)["stores"]
    assert [(one["worker"], one["blocks"]) for one in left] == [("w0", 5), ("w0", 1), ("w1", 2)]
    assert "0 files deleted" in run("clear", "--path", stores, "--worker", "w0", "--older-than", "90m").stdout
    run("clear", "--path", stores, "--worker", "w1")
    assert {one["worker"] for one in as_json("stat", "--path", stores)["stores"]} == {"w0"}


def test_clear_deletes_bad_files_that_were_put_aside(stores: Path) -> None:
    path = file(stores, "w1", OTHERS[1])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    disk = store(stores, "w1")
    assert not disk.read("w1", OTHERS[1], memoryview(bytearray(20_000)))
    disk.close()
    assert "(bad files)" in run("stat", "--path", stores).stdout
    assert as_json("stat", "--path", stores)["stores"][-1]["fingerprint"] is None
    assert as_json("verify", "--path", stores)["blocks"] == 10
    run("clear", "--path", stores)
    assert as_json("stat", "--path", stores)["stores"] == []


def test_clear_leaves_running_workers_alone(stores: Path, running: DiskStore) -> None:
    assert "w1 in" in refused("clear", "--path", stores)
    assert len(as_json("stat", "--path", stores)["stores"]) == 3
    assert "w1 in" in refused("clear", "--path", stores, "--worker", "w1")
    assert stored_blocks.clear(stores, "w1", float("inf"), force=False) is None  # it has started just now
    assert as_json("verify", "--path", stores)["blocks"] == 11
    assert run("clear", "--path", stores, "--worker", "w0").exit_code == 0
    assert run("clear", "--path", stores, "--force").exit_code == 0
    assert as_json("stat", "--path", stores)["stores"] == []
    assert running.write(OTHERS[0], payload(OTHERS[0]))  # it goes on


def test_while_a_worker_runs_everything_else_works(stores: Path, running: DiskStore) -> None:
    assert as_json("verify", "--path", stores)["blocks"] == 11
    assert as_json("ls", "--path", stores)["total"] == 4


def test_mistakes_are_named(stores: Path, tmp_path: Path) -> None:
    assert "--older-than soon: is not an age" in refused("clear", "--path", stores, "--older-than", "soon")
    assert "--worker w7: has no directory in" in refused("ls", "--path", stores, "--worker", "w7")
    assert "nowhere: No such file or directory" in refused("stat", "--path", stores / "nowhere")
    assert "tiers.disk_path is not set" in refused("stat")
    assert run("ls", "--path", stores, "--limit", "0").exit_code == 2


def test_the_configuration_says_where(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "headwater.yaml"
    config.write_text(f"tiers: {{disk_path: {stores}}}\n")
    assert as_json("ls", "--config", config)["total"] == 4
    monkeypatch.setenv("HEADWATER__TIERS__DISK_PATH", str(stores))
    assert as_json("ls")["total"] == 4


def test_as_a_command(stores: Path) -> None:
    """In a process of its own: exit code, one line for a mistake, and no bar where there is no terminal."""
    headwater = [str(Path(sys.executable).parent / "headwater"), "cache"]
    done = subprocess.run([*headwater, "verify", "--path", stores], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([*headwater, "stat", "--path", "/nowhere"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: /nowhere: No such file or directory\n")
