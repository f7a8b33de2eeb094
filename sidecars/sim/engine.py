"""One simulated engine: its model, memory, scheduler and identity, and how it dies."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from relax_slurm.forward import Exchange
from sidecars.ledger import OutOfMemory
from sidecars.sim.collective import Collective
from sidecars.sim.memory import CardMemory
from sidecars.sim.model import Model, Weights, fingerprint
from sidecars.sim.options import FaultKind, ServerArgs, SimOptions
from sidecars.sim.protocol import Item, Limits, Sampling
from sidecars.sim.scheduler import Scheduler

VERSION = "0.5.23+sim"
EXIT_CRASH = 1
EXIT_OUT_OF_MEMORY = 12
"""Exit code of an engine that did not fit on its cards."""


class SimEngine:
    """Everything behind the HTTP surface."""

    def __init__(self, options: SimOptions, args: ServerArgs, environ: dict[str, str]) -> None:
        self.options = options
        self.args = args
        self.limits = Limits(options.vocab_size, options.context_length)
        self.model_path = args.model_path
        self.served_model_name = args.served_model_name
        self.serving = False
        self.stopping = False
        self.health_generates = _flag(environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true"))
        self._health_timeout = float(environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        self._started = time.monotonic()
        self._probes = 0
        self._written: tuple[int, int, float] = (0, 0, time.time())
        """Requests, tokens and time of the load that was written down last: SGLang shows that, however old it is."""
        self.memory = CardMemory(options, args, _flag(environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "false")))
        weights = Weights(
            args.model_path,
            str(args.given.get("weight_version", "default")),
            fingerprint(options.seed, args.model_path),
        )
        self.updates = 0
        model = Model(options.role, options.seed, options.error_rate, options.vocab_size, options.context_length)
        self.scheduler = Scheduler(options, model, self.memory, weights, self.crash)
        self.collective: Collective | None = None
        """What ties the workers of a replica over several nodes together; None for one node."""

    # ---- life
    # --------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Take memory and pretend to load. Ends the process when it does not fit or is meant to fail."""
        options = self.options
        try:
            self.memory.start()
        except OutOfMemory as error:
            self.out_of_memory(error)
        failing = options.fault(FaultKind.FAIL_START)
        if failing is not None:
            log(f"RuntimeError: injected fault {failing.kind}")
            self._end(int(failing.value) or EXIT_CRASH)
        await asyncio.sleep(options.startup_seconds)
        if options.fault(FaultKind.HANG_START):
            await asyncio.Event().wait()
        self.serving = True
        log("The server is fired up and ready to roll!")

    def move_memory(self, call: str, tags: Sequence[str]) -> None:
        """Release or resume `tags` on this worker's cards. Ends the process when they are full."""
        if call == "release":
            self.memory.release(tags)
            return
        try:
            garbled = self.memory.resume(tags)
        except OutOfMemory as error:
            self.out_of_memory(error)
        if garbled:
            now = self.scheduler.weights
            self.scheduler.weights = Weights(now.path, now.version, now.fingerprint, garbled=True)

    async def tell(self, call: str, tags: Sequence[str]) -> None:
        """Let the replica's other workers do the same, and wait until they have."""
        if self.collective is not None:
            await self.collective.tell(call, tags)

    def crash(self, reason: str) -> None:
        """Die of a request: the scheduler's exception now, the end of the process a little later."""
        log(f"Scheduler hit an exception: {reason}")
        asyncio.get_running_loop().call_later(self.options.crash_seconds, self._end, EXIT_CRASH)

    def out_of_memory(self, error: OutOfMemory) -> NoReturn:
        """Die because a card is full."""
        log(f"torch.OutOfMemoryError: CUDA out of memory. {error}")
        self._end(EXIT_OUT_OF_MEMORY)

    def end_after(self, seconds: float, reason: str) -> None:
        """Die because a peer of the replica is gone."""
        log(reason)
        asyncio.get_running_loop().call_later(seconds, self._end, EXIT_CRASH)

    def _end(self, code: int) -> NoReturn:
        # No clean-up on purpose: a dying engine closes its sockets by ending and leaves its ledger lines
        # behind.
        sys.stderr.flush()
        os._exit(code)

    async def drain(self) -> None:
        """Wait until nothing is in flight; what SIGTERM does before the process ends."""
        self.stopping = True
        while self.scheduler.in_scheduler():
            await asyncio.sleep(0.01)

    async def follow(self, exchange: Exchange) -> None:
        """All that a follower of a replica over several nodes serves: a health that proves little."""
        if exchange.request.path in {"/ping", "/health", "/health_generate"}:
            exchange.respond(200 if self.serving else 503)
        else:
            exchange.respond_json(404, {"detail": "Not Found"})

    # ---- health
    # ------------------------------------------------------------------------------------------------

    async def maybe_hang_health(self) -> None:
        """Never return once the fault says so."""
        fault = self.options.fault(FaultKind.HANG_HEALTH)
        if fault is not None and time.monotonic() - self._started >= fault.value:
            await asyncio.Event().wait()

    async def generates_a_token(self) -> bool:
        """Generate one token, as the real health check does; a second at least, False after its timeout."""
        self._probes += 1
        item = Item(f"HEALTH_CHECK_{self._probes}", (0,), Sampling(max_new_tokens=1), None)
        (flight,) = self.scheduler.admit((item,))
        self.scheduler.accepted -= 1

        async def play() -> None:
            async for _ in self.scheduler.play(flight, stepwise=False):
                pass

        try:
            async with asyncio.timeout(self._health_timeout):
                await asyncio.gather(play(), asyncio.sleep(1.0))
            return True
        except TimeoutError:
            return False
        finally:
            self.scheduler.drop(flight)
            self.scheduler.leave(flight)

    # ---- information
    # -------------------------------------------------------------------------------------------

    def model_info(self) -> dict[str, Any]:
        """The body of /model_info."""
        return {
            "model_path": self.model_path,
            "served_model_name": self.served_model_name,
            "tokenizer_path": self.args.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.scheduler.weights.version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "sim",
            "architectures": ["SimForCausalLM"],
        }

    def server_info(self) -> dict[str, Any]:
        """The body of /server_info: every argument, keys included, as the real one gives them away."""
        return {
            **{key: _plain(value) for key, value in self.args.given.items()},
            "model_path": self.args.model_path,
            "served_model_name": self.args.served_model_name,
            "host": self.args.host,
            "port": self.args.port,
            "nnodes": self.args.nnodes,
            "node_rank": self.args.node_rank,
            "api_key": self.args.api_key,
            "admin_api_key": self.args.admin_api_key,
            "enable_memory_saver": self.args.enable_memory_saver,
            "max_total_num_tokens": self.limits.context_length,
            "max_req_input_len": self.limits.context_length - 1,
            "startup_time": {"load_weight": self.options.startup_seconds},
            "internal_states": [{"last_gen_throughput": 0.0}],
            "version": VERSION,
            "frontend": "python",
        }

    def loads(self) -> dict[str, Any]:
        """The body of /v1/loads."""
        running = len(self.scheduler.in_scheduler())
        used = self.scheduler.used_tokens()
        if (running, used) != self._written[:2]:
            self._written = running, used, time.time()
        load = {
            "timestamp": self._written[2],
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": self.limits.context_length,
            "token_usage": 0.0,
            "gen_throughput": 0.0,
        }
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        return {
            "timestamp": now,
            "version": VERSION,
            "accelerator": None,
            "num_accelerators": max(len(self.options.gpus), 1),
            "loads": [load],
        }

    def metrics(self) -> str:
        """A few Prometheus lines."""
        labels = f'{{model_name="{self.served_model_name}"}}'
        values = {
            "num_running_reqs": ("gauge", len(self.scheduler.in_scheduler())),
            "num_queue_reqs": ("gauge", 0),
            "num_requests_total": ("counter", self.scheduler.accepted),
            "generation_tokens_total": ("counter", self.scheduler.generated_tokens),
        }
        lines = []
        for name, (kind, value) in values.items():
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{labels} {value}"]
        return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """A flag's value with its type: a whole number is one."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _flag(text: str) -> bool:
    return text.strip().lower() in {"1", "true", "yes", "on"}


def log(message: str) -> None:
    """One line on stderr, which is the engine's log."""
    print(time.strftime("[%Y-%m-%d %H:%M:%S] ") + message, file=sys.stderr, flush=True)  # noqa: T201
