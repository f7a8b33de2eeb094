"""Engines for tests: real processes, started from the same command line that a sidecar would use."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from relax_slurm.core.plan import Role
from sidecars.command_line import build
from sidecars.worker import EnginePorts, WorkerSpec

START_SECONDS = 400.0
REAL = "RELAX_TEST_SGLANG_PYTHON" in os.environ
"""Whether the environment names a Python with SGLang; `make test-real` does."""
PORT_LOCKS = Path(tempfile.gettempdir()) / f"relax-slurm-test-ports-{os.getuid()}"
_next = itertools.count(os.getpid() * 131)
_held: dict[int, int] = {}
"""Port to the descriptor that holds its lock."""


def free_port() -> int:
    """A port outside the ephemeral range that can be bound now, and that no other test process of this machine gets.

    A bound port would tell the others too, but an engine has to bind it: so a locked file stands for each, until this
    process ends.
    """
    PORT_LOCKS.mkdir(mode=0o777, parents=True, exist_ok=True)
    for _ in range(10_000):
        port = 20_000 + next(_next) % 10_000
        if port in _held:
            continue  # had before; what listened there may still be going
        lock = os.open(PORT_LOCKS / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(lock)
            continue
        _held[port] = lock
        return port
    raise RuntimeError("no free port")


def worker(tmp: Path, **changes: Any) -> WorkerSpec:
    """A simulated rollout engine on two GPUs of a ledger in `tmp`; every field can be changed."""
    sim = {"ledger": str(tmp / "ledger"), "tokens_per_second": 0, **changes.pop("sim", {})}
    fields: dict[str, Any] = {
        "worker_id": "policy/replica-0#0",
        "replica_id": "policy/replica-0",
        "role": Role.ROLLOUT,
        "model": "policy",
        "program": "sim",
        "model_path": "sim/policy",
        "served_model_name": "policy",
        "host": "127.0.0.1",
        "ports": EnginePorts(free_port(), free_port(), free_port(), free_port()),
        "log_path": str(tmp / "engine.log"),
        "run_tag": f"test-{os.getpid()}-{tmp.name}",
        "gpus": ("0", "1"),
        "gpu_indexes": (0, 1),
        "memory_saver": True,
        "startup_seconds": 20.0,
        "sim": sim,
        "python": sys.executable,
    }
    return WorkerSpec(**{**fields, **changes})


@dataclass
class Launched:
    """A running engine with a client that has its admin key, if it has one."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    http: httpx.Client

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def flush(self, seconds: float = 20.0) -> None:
        """Empty the cache. A scheduler keeps a request for a moment after its last token, so it takes a few tries."""
        deadline = time.monotonic() + seconds
        while self.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "something still runs"
            time.sleep(0.02)

    def log(self) -> str:
        return Path(self.spec.log_path).read_text()

    def events(self, path: str, body: Any) -> list[bytes]:
        """Data of the server-sent events of a stream, in order."""
        with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            raw = b"".join(answer.iter_raw())
        blocks = raw.split(b"\n\n")
        assert blocks[-1] == b"", "the stream ends with an empty line"
        assert all(block.startswith(b"data: ") for block in blocks[:-1])
        return [block.removeprefix(b"data: ") for block in blocks[:-1]]


@contextmanager
def launch(spec: WorkerSpec, *, wait: bool = True) -> Iterator[Launched]:
    """Run an engine, ready when entered, gone when left."""
    command = build(spec)
    if command.private is not None:
        command.private.path.write_bytes(command.private.content)
    with open(spec.log_path, "ab") as log:
        process = subprocess.Popen(command.argv, env=command.env, stdout=log, stderr=log, start_new_session=True)
    key = spec.admin_key or spec.api_key
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    # SGLang closes idle connections after 5 s, so that a kept one may be gone just when it is used again.
    once = httpx.Limits(max_keepalive_connections=0)
    client = httpx.Client(base_url=spec.base_url, headers=headers, timeout=60.0, trust_env=False, limits=once)
    engine = Launched(spec, process, client)
    try:
        if wait:
            wait_ready(engine)
        yield engine
    finally:
        client.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_ready(engine: Launched) -> None:
    """Return when /health is 200; fail with the log when the process ends first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if engine.process.poll() is not None:
            raise AssertionError(f"engine ended with {engine.process.returncode}: {engine.log()[-2000:]}")
        try:
            if engine.get("/health", timeout=30.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"engine not ready: {engine.log()[-2000:]}")


def spec_of(program: str, tmp: Path, **changes: Any) -> WorkerSpec:
    """A worker of either program; what only the simulator knows is left out for SGLang."""
    if program == "sim":
        return worker(tmp, **changes)
    real = real_sglang()
    arguments = {**real.pop("engine_args"), **changes.pop("engine_args", {})}
    return worker(tmp, **{**real, **changes, "sim": {}, "engine_args": arguments})


def real_sglang() -> dict[str, Any]:
    """Changes that turn `worker()` into the SGLang that the environment describes.

    RELAX_TEST_SGLANG_PYTHON and RELAX_TEST_SGLANG_MODEL are needed; RELAX_TEST_SGLANG_ARGS (JSON, engine
    arguments) and RELAX_TEST_SGLANG_ENV (JSON, variables) are optional.
    """
    return {
        "program": "sglang",
        "python": os.environ["RELAX_TEST_SGLANG_PYTHON"],
        "model_path": os.environ["RELAX_TEST_SGLANG_MODEL"],
        "engine_args": json.loads(os.environ.get("RELAX_TEST_SGLANG_ARGS", "{}")),
        "env": json.loads(os.environ.get("RELAX_TEST_SGLANG_ENV", "{}")),
        "gpus": (),
        "gpu_indexes": (),
        "startup_seconds": START_SECONDS,
    }


def require_engine() -> None:
    """Skip, saying why, where no SGLang is named; fail when the environment's REQUIRE names engine."""
    if REAL:
        return
    reason = "RELAX_TEST_SGLANG_PYTHON names no environment with SGLang; `make test-real` makes one"
    if "engine" in os.environ.get("REQUIRE", "").replace(",", " ").split():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
