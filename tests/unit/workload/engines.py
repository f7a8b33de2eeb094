"""Three simulated engines and a gateway in this process, on real sockets of the loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from relax_slurm.client.inference import InferenceClient
from relax_slurm.core.discovery import EngineEntry, ModelEntry, ReplicaState, RoleSnapshot, RoutingSpec
from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.forward import Exchange, HttpServer, Upstream
from relax_slurm.gateway import Gateway, GatewaySettings
from relax_slurm.workload.making import Access
from sidecars.sim.engine import SimEngine
from sidecars.sim.options import ServerArgs, SimOptions
from sidecars.sim.server import SimServer
from tests.unit.gateway.stage import Source

TOKEN = "secret-token"


class Sim:
    """One simulated engine behind a server that counts what it is asked."""

    def __init__(self, role: Role, **options: object) -> None:
        fields: dict[str, object] = {"tokens_per_second": 0, **options}
        version = ["--weight-version", "7"] if role is Role.ROLLOUT else []
        args = ServerArgs.parse(["--model-path", f"sim/{role}", "--served-model-name", str(role), *version], {})
        self.engine = SimEngine(SimOptions(role=str(role), **fields), args, {})  # type: ignore[arg-type]
        self._inner = SimServer(self.engine).handle
        self.server = HttpServer(self._handle)
        self.bodies: list[bytes] = []
        self.keys: list[str | None] = []
        self.url = ""

    def _handle(self, exchange: Exchange) -> object:
        if exchange.request.path == "/generate":
            self.bodies.append(exchange.request.body)
            key = dict(exchange.request.headers).get(b"x-smg-routing-key")
            self.keys.append(None if key is None else key.decode())
        return self._inner(exchange)

    async def start(self) -> None:
        """Load and listen."""
        await self.engine.load()
        self.url = f"http://127.0.0.1:{await self.server.start()}"


@dataclass
class Engines:
    """All of it."""

    sims: dict[Role, Sim]
    source: Source
    client: InferenceClient
    gateway_url: str

    @property
    def access(self) -> Access:
        """For code that makes a client of its own."""
        return Access(self.gateway_url, TOKEN)

    def show(self, role: Role, state: ReplicaState = ReplicaState.READY) -> None:
        """Publish a role in a state."""
        url = self.sims[role].url
        weights = WeightSource.ACTOR if role is Role.ROLLOUT else WeightSource.STATIC
        version = "7" if role is Role.ROLLOUT else None
        models = {}
        for name in ("m", "other"):
            engine = EngineEntry(f"{name}/replica-0", url, state, state is ReplicaState.READY, 1)
            models[name] = ModelEntry(name, state, RouteMode.DIRECT, None, weights, version, str(role), (engine,))
        self.source.views[role] = RoleSnapshot(
            role, "000001-abcdef", 1, RoutingSpec("m", {"code": "other"}, {}), models
        )


@asynccontextmanager
async def engines(**options: object) -> AsyncIterator[Engines]:
    """Up inside the block. `options` are those of the simulated rollout engine."""
    sims = {role: Sim(role, **(options if role is Role.ROLLOUT else {})) for role in Role}
    for sim in sims.values():
        await sim.start()
    source = Source()
    gateway = Gateway(source, Upstream(), GatewaySettings(token=TOKEN))
    url = f"http://127.0.0.1:{await gateway.start()}"
    async with InferenceClient.subscribed(source, timeout_seconds=60) as client:
        held = Engines(sims, source, client, url)
        for role in Role:
            held.show(role)
        try:
            yield held
        finally:
            await gateway.stop(0.2)
            for sim in sims.values():
                await sim.server.stop(0.2)
