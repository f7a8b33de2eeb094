"""Log lines of our own processes: one JSON object per line on stderr, which the supervisor sends to a file."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import BinaryIO


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


def open_log(path: Path) -> BinaryIO:
    """A process's log file for appending, made private: prompts and answers may be in it.

    Not by umask, which engines would inherit and which would close the site's shared caches to others.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
