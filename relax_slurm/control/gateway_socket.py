"""The gateway's listening socket. The supervisor opens it once and hands it to every gateway process it starts.

So a gateway that is started again is where the last one was: connections wait in the kernel meanwhile, and nobody
else on this machine can take the port, and with it the bearer tokens of clients that come back.
"""

from __future__ import annotations

import socket

from relax_slurm.config.models import RunConfig
from relax_slurm.control.head_ports import head_ports
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.errors import StartupFailed

BACKLOG = 1024
_EVERYWHERE = ("0.0.0.0", "::")


def open_gateway_socket(config: RunConfig, plan: InferencePlacementPlan, head: str) -> socket.socket:
    """A listening socket on the configured port, or on the first free one of the head's ports.

    `head` is the head node's address, used where the run file names none. `StartupFailed` when nothing is free.
    """
    host = config.gateway.host or head
    wanted = config.gateway.port
    ports = [wanted] if wanted is not None else head_ports(plan.ports.first, plan.ports.last)
    reason = ""
    for port in ports:
        try:
            return _listen(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
    raise StartupFailed(
        f"the gateway found no port on {host} among {min(ports)}..{max(ports)} ({reason}); set gateway.port or free one"
    )


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def url_of(opened: socket.socket, head: str) -> str:
    """The URL to publish: the socket's address, or the head's where it listens everywhere."""
    host, port = opened.getsockname()[:2]
    public = head if host in _EVERYWHERE else host
    return f"http://[{public}]:{port}" if ":" in public else f"http://{public}:{port}"
