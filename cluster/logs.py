"""Logs of every process: one JSON object a line, warnings and worse."""

from __future__ import annotations

import json
import logging
import sys
import time

from router.gateway import request_id


class JsonFormatter(logging.Formatter):
    """A record as `{"time", "level", "logger", "message"}`, with the id of the client's request under `request` and the
    traceback under `error` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.current.get():
            line["request"] = name
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup() -> None:
    """Install the formatter."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
