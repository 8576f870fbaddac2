"""How much a process grows over a batch of many lines, after one of a tenth of them, where a share of the lines is
sent: `python flat.py DIRECTORY LINES SHARE`. Requests are answered here and at once, so that there are no tokens: the
answers' source is a stub."""

import asyncio
import json
import sys
from pathlib import Path

from router.batch.index import Index
from router.batch.journal import Journal
from router.batch.lines import Item
from router.batch.run import run
from router.batch.send import Answer
from router.batch.tally import Tally


async def at_once(item: Item) -> Answer:
    return Answer(200, "", {"choices": [], "usage": {}}, None)


def carry_out(path: Path, count: int, sent: int) -> None:
    """Read all lines, and send the first `sent` of the order."""
    with path.open("w") as file:
        for number in range(count):
            body = {"model": "m", "prompt": f"template {number % 5} " * 12 + str(number)}
            one = {"custom_id": f"request-{number * 7919 % count}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**one, "body": body}) + "\n")
    with Index([path]) as index, Journal(path.with_suffix(".out")) as journal:
        tally = Tally(index.total)
        order = (line for line, _ in zip(index.order(True, 4), range(sent), strict=False))
        asyncio.run(run(index, journal, order, at_once, 64, tally))
        assert (tally.total, tally.rows, tally.failed) == (count, sent, 0)


def peak_mb() -> float:
    """Of this program: `ru_maxrss` begins with what the process was before it became this."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


directory, lines, share = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
carry_out(directory / "few.jsonl", lines // 10, int(lines // 10 * share))
few = peak_mb()
carry_out(directory / "many.jsonl", lines, int(lines * share))
print(json.dumps({"lines": lines, "few_mb": few, "grown_mb": peak_mb() - few, "token_source": "stub"}))  # noqa: T201
