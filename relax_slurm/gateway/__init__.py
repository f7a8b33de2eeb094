"""The HTTP gateway of a run: `/rollout`, `/genrm` and `/teacher` behind one handler."""

from relax_slurm.core.discovery import SnapshotSource
from relax_slurm.gateway.app import Gateway, serve
from relax_slurm.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings", "SnapshotSource", "serve"]
