"""The run directory: where the pieces of a run find each other (docs/operations.md, Run directory).

`<runs root>/<run>/attempt_N/{config.json, plan.json, job.sbatch, endpoint.json, keys/, journal/, logs/, events.jsonl}`
(and a few more) with a `latest` link beside the attempts. Folders are 0700, our files 0600; every file that another
process reads is written atomically.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from relax_slurm.control import event_log
from relax_slurm.errors import ConfigError, StartupFailed

log = logging.getLogger(__name__)
ATTEMPT_PREFIX = "attempt_"
TRIAL_BYTES = 64 * 1024
"""More than any file that an attempt writes at its start, so that a disk with a few free blocks counts as full."""


def runs_root(configured: str | None, environ: Mapping[str, str]) -> Path:
    """Folder that holds all runs: the run file's `runs_root`, RELAX_RUNS_ROOT, or ~/.relax_slurm/runs."""
    chosen = configured or environ.get("RELAX_RUNS_ROOT") or "~/.relax_slurm/runs"
    return Path(chosen).expanduser().absolute()


def run_folder(root: Path, run: str) -> Path:
    """The folder of all attempts of `run`, made private to this user."""
    folder = root / run
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"run folder {folder} belongs to another user; choose another name or runs_root")
    folder.chmod(0o700)
    return folder


def cannot_write(root: Path, error: OSError) -> ConfigError:
    """What to say when the files of a run cannot be written: no space, no permission, no such place."""
    return ConfigError(
        f"runs_root: cannot write the files of a run under {root} ({error.strerror or error}); "
        f"free space there, or choose another folder with runs_root or RELAX_RUNS_ROOT"
    )


def why_not_writable(folder: Path) -> str | None:
    """A sentence when a small file cannot be written into a run's folder now (a full disk, a quota); None when it can.

    For an attempt that ended without a word: what kept it from writing keeps us too, most of the time.
    """
    try:
        trial = folder / f".trial.{os.getpid()}"
        try:
            write_atomically(trial, " " * TRIAL_BYTES)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return f"nothing can be written into {folder} ({error.strerror or error}); free space there and launch again"
    return None


@contextmanager
def launch_lock(root: Path, run: str) -> Iterator[None]:
    """Held while a run of this name is looked for, prepared and submitted.

    `ConfigError` when somebody else has it, or when the run's folder cannot be written.
    """
    try:
        lock = FileLock(str(run_folder(root, run) / "launch.lock"))
        lock.acquire(timeout=0)
    except Timeout as held:
        raise ConfigError(
            f"another launch of run {run!r} is under way ({held.lock_file}); wait for it or choose another name"
        ) from None
    except OSError as error:
        raise cannot_write(root, error) from None
    try:
        yield
    finally:
        lock.release(force=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None while the file does not exist. A shared file system may answer stale once."""
    for attempt in range(3):
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            if attempt == 2:
                raise StartupFailed(f"cannot read {path}: {error}") from None
            time.sleep(0.05)
            continue
        if not isinstance(value, dict):
            raise StartupFailed(f"{path} holds {type(value).__name__}, wanted a JSON object")
        return value
    return None


@dataclass(frozen=True, slots=True)
class RunDir:
    """One attempt of one run."""

    path: Path

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.path.parent.name

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 1."""
        return int(self.path.name.removeprefix(ATTEMPT_PREFIX))

    @property
    def mark(self) -> str:
        """Short mark of this attempt's folder, unique on the file system."""
        return sha256(str(self.path).encode()).hexdigest()[:10]

    @property
    def tag(self) -> str:
        """What every process of this attempt carries in its environment, so that orphans can be told apart."""
        return f"{self.run}/{self.attempt}@{self.path}"

    @property
    def keys(self) -> Path:
        """CURVE key files."""
        return self.path / "keys"

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.path / "logs"

    @property
    def token_file(self) -> Path:
        """Bearer token of the gateway."""
        return self.path / "token"

    @property
    def engine_key_file(self) -> Path:
        """Bearer key that admission guards ask of the gateway and of direct clients."""
        return self.keys / "engine.token"

    @property
    def ledger(self) -> Path:
        """Where simulated engines account for the memory of their cards; one folder for all attempts."""
        return self.path.parent / "ledger"

    @classmethod
    def upcoming(cls, root: Path, run: str) -> RunDir:
        """The attempt that `create` would make now; nothing is made."""
        parent = root / run
        return cls(parent / f"{ATTEMPT_PREFIX}{1 + max(_attempts(parent), default=0)}")

    @classmethod
    def create(cls, root: Path, run: str) -> RunDir:
        """Make the next attempt of `run`, private to this user, with keys' and logs' folders."""
        parent = run_folder(root, run)
        number = cls.upcoming(root, run).attempt
        while True:
            path = parent / f"{ATTEMPT_PREFIX}{number}"
            try:
                path.mkdir(mode=0o700)
                break
            except FileExistsError:  # another launch of the same name took it
                number += 1
        for name in ("keys", "logs", "journal"):
            (path / name).mkdir(mode=0o700)
        (parent / "ledger").mkdir(mode=0o700, exist_ok=True)
        return cls(path)

    def make_latest(self) -> None:
        """Point `latest` here; to be called when everything that others read is written."""
        link = self.path.parent / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)  # of a process of that number that was killed
        link.symlink_to(self.path.name)
        link.replace(self.path.parent / "latest")

    def next_attempt(self) -> RunDir:
        """A new attempt with this one's config, plan and secrets: what a requeued job runs in."""
        fresh = RunDir.create(self.path.parent.parent, self.run)
        for key in self.keys.iterdir():
            write_atomically(fresh.keys / key.name, key.read_text())
        for name in ("token", "config.json", "plan.json", "job.sbatch", "job.json"):
            if (self.path / name).exists():
                write_atomically(fresh.path / name, (self.path / name).read_text())
        fresh.make_latest()
        return fresh

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """One of the attempt's JSON files, atomically."""
        write_atomically(self.path / name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    def write_secret(self, path: Path) -> str:
        """A random URL-safe secret, kept when it already exists."""
        if not path.exists():
            write_atomically(path, secrets.token_urlsafe(32) + "\n")
        return path.read_text().strip()

    def write_outcome(self, outcome: Mapping[str, Any]) -> bool:
        """How the attempt ended, as `outcome.json`; False, and a clear line in the log, when it cannot be written."""
        try:
            self.write_json("outcome.json", outcome)
        except OSError as error:
            log.error(
                "the outcome cannot be written into %s (%s), free space there; it is: %s",
                self.path,
                error.strerror or error,
                json.dumps(outcome),
            )
            return False
        return True

    def read(self, name: str) -> dict[str, Any] | None:
        """One of the attempt's JSON files, or None."""
        return read_json(self.path / name)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """One line in events.jsonl, beside those of other processes. One that cannot be written is only logged."""
        try:
            event_log.append(self.path, event_log.line_of(event))
        except OSError as error:
            log.warning("event %s is lost: %s", event.get("event"), error.strerror)

    def next_epoch(self) -> str:
        """A new epoch, higher than every earlier one of this run (docs/protocol.md, Epoch)."""
        counter = self.path.parent / "epoch"
        with FileLock(str(counter) + ".lock", timeout=30):
            last = int(counter.read_text()) if counter.exists() else 0
            write_atomically(counter, f"{last + 1}\n")
        return f"{last + 1:06d}-{secrets.token_hex(3)}"

    @contextmanager
    def coordinator_lock(self) -> Iterator[None]:
        """Held by the coordinator for its lifetime: a convenience; the epoch is the safety. `AlreadyRunning`."""
        lock = FileLock(str(self.path / "coordinator.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise AlreadyRunning(
                f"another coordinator of run {self.run!r} holds {lock.lock_file}; stop it or use `relax-slurm status`"
            ) from None
        try:
            yield
        finally:
            lock.release(force=True)

    def newest(self) -> RunDir:
        """The attempt that this one's job runs in now: Slurm may have started it again, which makes a new attempt."""
        job = self.read("job.json")
        latest = self.path.parent / "latest"
        if job is None or not latest.exists():
            return self
        newest = RunDir(latest.resolve())
        return newest if newest.attempt > self.attempt and newest.read("job.json") == job else self


class AlreadyRunning(StartupFailed):
    """Somebody else is this run's coordinator; whoever gets this leaves without a trace."""

    code = "already_running"


def _attempts(parent: Path) -> list[int]:
    names = (entry.name.removeprefix(ATTEMPT_PREFIX) for entry in parent.glob(f"{ATTEMPT_PREFIX}*"))
    return [int(name) for name in names if name.isdigit()]


def attempts_of(parent: Path) -> list[RunDir]:
    """All attempts in a run's folder, newest first."""
    return [RunDir(parent / f"{ATTEMPT_PREFIX}{number}") for number in sorted(_attempts(parent), reverse=True)]


def find(root: Path, run: str) -> RunDir:
    """The newest attempt of `run`, submitted or not. A path to an attempt is accepted too."""
    if "/" in run:
        path = Path(run).expanduser().resolve()
        if not (path / "plan.json").exists() or not path.name.removeprefix(ATTEMPT_PREFIX).isdigit():
            raise ConfigError(f"{path} is no attempt's folder (attempt_N with a plan.json in it); give the run's name")
        return RunDir(path)
    latest = root / run / "latest"
    if not latest.exists():
        known = ", ".join(sorted(entry.parent.name for entry in root.glob("*/latest"))) or "none"
        raise ConfigError(f"no run called {run!r} under {root}; known runs: {known}")
    return RunDir(latest.resolve())
