"""Byte-exact HTTP forwarding on llhttp: a server, a pool of upstream connections, the relay between them."""

from relax_slurm.forward.call import Response
from relax_slurm.forward.exchange import ClientGone, Exchange, Handler
from relax_slurm.forward.http import Headers, Limits, Request
from relax_slurm.forward.proxy import Deadlines, End, Outcome, forward, relay
from relax_slurm.forward.reader import Admit, Denied
from relax_slurm.forward.server import HttpServer
from relax_slurm.forward.upstream import Upstream, UpstreamLimits

__all__ = [
    "Admit",
    "ClientGone",
    "Deadlines",
    "Denied",
    "End",
    "Exchange",
    "Handler",
    "Headers",
    "HttpServer",
    "Limits",
    "Outcome",
    "Request",
    "Response",
    "Upstream",
    "UpstreamLimits",
    "forward",
    "relay",
]
