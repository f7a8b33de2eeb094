"""Log lines of our own processes: one JSON object per line on stderr, which the supervisor sends to a file."""

from __future__ import annotations

import json
import logging
import time


class JsonLines(logging.Formatter):
    """One record as one JSON line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Fixed keys; a traceback, if there is one, in `traceback`."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def to_stderr(process: str, level: int = logging.INFO) -> None:
    """Set up the root logger of a process of ours."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
