"""CURVE key pairs of a run and the check of who may connect (docs/protocol.md, Transport and identity)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq

from relax_slurm.errors import StartupFailed
from relax_slurm.wire.messages import PeerKind


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85-encoded CURVE keys."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one peer needs: its own pair and the coordinator's public key."""

    kind: PeerKind
    own: KeyPair
    server_public: bytes


def write_keys(folder: Path) -> None:
    """Make one key pair per kind of peer in `folder` (created 0700, files 0600). Existing keys are kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for kind in PeerKind:
        target = folder / f"{kind}.key"
        if target.exists():
            continue
        public, secret = zmq.curve_keypair()
        partial = folder / f".{kind}.{os.getpid()}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(public + b"\n" + secret + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(target)


def read_pair(folder: Path, kind: PeerKind) -> KeyPair:
    """One pair; `StartupFailed` when the file is missing or not two Z85 keys."""
    path = folder / f"{kind}.key"
    try:
        lines = path.read_bytes().split()
    except OSError as error:
        raise StartupFailed(f"cannot read {path}: {error.strerror}; is this the owner of the run?") from None
    if len(lines) != 2 or any(len(line) != 40 for line in lines):
        raise StartupFailed(f"{path} holds {len(lines)} fields, wanted two Z85 keys of 40 characters; launch again")
    return KeyPair(*lines)


def credentials(folder: Path, kind: PeerKind) -> Credentials:
    """Everything a connecting peer of this kind needs."""
    return Credentials(kind, read_pair(folder, kind), read_pair(folder, PeerKind.COORDINATOR).public)


def allowed(folder: Path) -> dict[bytes, PeerKind]:
    """Public keys that the coordinator accepts."""
    return {read_pair(folder, kind).public: kind for kind in (PeerKind.SIDECAR, PeerKind.CLIENT)}
