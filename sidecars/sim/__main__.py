"""`python -m sidecars.sim`: read flags and options, take memory, serve until told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys

from relax_slurm.errors import RelaxError
from relax_slurm.forward import HttpServer, Limits
from sidecars.sim.collective import Collective
from sidecars.sim.engine import SimEngine, log
from sidecars.sim.options import FaultKind, ServerArgs, SimOptions, read_options
from sidecars.sim.server import SimServer

# A sleeping request of a paused engine, or a long prompt, must not be cut by the server's own clock.
_LIMITS = Limits(max_body_bytes=256 << 20, keep_alive_seconds=5.0, body_seconds=600.0, stall_seconds=600.0)


async def serve(options: SimOptions, args: ServerArgs) -> int:
    """Run one worker until SIGTERM or SIGINT; the exit code."""
    engine = SimEngine(options, args, dict(os.environ))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if options.fault(FaultKind.IGNORE_TERM):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    is_head = args.node_rank == 0
    server = HttpServer(SimServer(engine).handle if is_head else engine.follow, _LIMITS)
    try:
        await server.start(args.host, args.port)
    except OSError as error:
        log(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}; is the port taken?")
        return 1
    log(f"listening on {args.host}:{args.port}, model {args.model_path}, rank {args.node_rank}/{args.nnodes}")
    starting = asyncio.create_task(_start(engine))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
    gc.collect()
    gc.freeze()
    await stopping
    log("SIGTERM: draining")
    starting.cancel()
    await engine.drain()
    engine.memory.close()
    await server.stop(0.5)
    return 0


async def _start(engine: SimEngine) -> None:
    """Join the other workers and load."""
    args, seconds = engine.args, engine.options.collective_seconds
    if args.nnodes > 1:
        engine.collective = Collective(
            args.dist_init_addr,
            args.nnodes,
            args.node_rank,
            lambda reason: engine.end_after(seconds, reason),
            engine.move_memory,
        )
        await engine.collective.join()
    await engine.load()


def main() -> int:
    """Entry point; configuration mistakes are one line and exit code 2."""
    try:
        options, args = read_options(), ServerArgs.parse(sys.argv[1:])
    except RelaxError as error:
        log(error.message)
        return error.exit_code
    return asyncio.run(serve(options, args))


if __name__ == "__main__":
    sys.exit(main())
