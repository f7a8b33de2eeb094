"""One rule for everybody: from a snapshot and what the request says to the place it must go.

Explicit model (id or alias) > route key > default model. A DIRECT model takes turns over its routable
replicas, or hashes the affinity key; a SGLANG_ROUTER model has one URL.

How the affinity hash stays exact and cheap
-------------------------------------------
Highest random weight gives every (replica, key) pair a weight that depends on nothing else; the heaviest
replica wins, so a lost replica moves only its own keys. A thousand hashes per request would cost about 0.3 ms
in Python. Here the weight is a pair: the rank of a one-byte *class*, then a 64-bit mix that only breaks ties.
Each replica has `ROWS` random class bytes, derived once from its id. The key picks a row and one of 256 fixed
permutations of the byte values; the first value of the permutation that occurs in the row wins. So a lookup
is a `bytes.find` over N bytes and a handful of mixes. The price: ROWS bytes per replica, and loads that
differ by a few percent, because chance is averaged over ROWS x 256 cells and not over infinitely many.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, shake_128

from relax_slurm.core.plan import Role, RouteMode
from relax_slurm.core.snapshot import EngineEntry, ModelEntry, Policy, ReplicaState, RoleSnapshot
from relax_slurm.errors import BadRequest, Unavailable

ROWS = 256
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
_DIGEST = struct.Struct("<QBB6x")
_FEW = 96
"""Below this many replicas an exact hit is rare enough that ranking all of them is quicker than searching."""


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """Where one request goes. `engine_id` and `generation` are None behind a router."""

    role: Role
    model: str
    url: str
    engine_id: str | None
    generation: int | None
    epoch: str
    revision: int
    served_model_name: str
    external: bool = False
    """Somebody else's engine: the run's engine key must not go there."""


@lru_cache(maxsize=8192)
def _column(engine_id: str) -> tuple[bytes, int]:
    """A replica's class bytes and its seed for breaking ties; a function of the stable id alone."""
    digest = shake_128(engine_id.encode("utf-8", "surrogatepass")).digest(ROWS + 8)
    return digest[:ROWS], int.from_bytes(digest[ROWS:], "little")


@lru_cache(maxsize=256)
def _permutation(order: int) -> tuple[bytes, bytes]:
    """The `order`-th fixed permutation of the byte values, and the rank of each value in it."""
    noise = struct.unpack("<256I", shake_128(b"order%d" % order).digest(1024))
    permutation = bytes(sorted(range(256), key=noise.__getitem__))
    rank_of = bytearray(256)
    for rank, value in enumerate(permutation):
        rank_of[value] = rank
    return permutation, bytes(rank_of)


class Rendezvous:
    """Highest-random-weight choice among a fixed list of ids, scoped so that scopes spread independently."""

    __slots__ = ("_flat", "_prefix", "_rows", "_seeds", "_size")

    def __init__(self, scope: str, ids: Sequence[str]) -> None:
        columns = [_column(engine_id) for engine_id in ids]
        self._flat = b"".join([column for column, _ in columns])
        self._seeds = [seed for _, seed in columns]
        self._size = len(columns)
        self._rows: list[bytes | None] = [None] * ROWS
        self._prefix = blake2b(scope.encode("utf-8", "surrogatepass") + b"\0", digest_size=16)

    def choose(self, key: str) -> int:
        """Index of the winner. The list must not be empty."""
        mixed: int
        number: int
        order: int
        digest = self._prefix.copy()
        digest.update(key.encode("utf-8", "surrogatepass"))
        mixed, number, order = _DIGEST.unpack(digest.digest())
        row = self._rows[number]
        if row is None:
            row = self._rows[number] = self._flat[number::ROWS]
        permutation, rank_of = _permutation(order)
        found = -1
        if self._size < _FEW:
            row = row.translate(rank_of)
            wanted = min(row)
            found = row.find(wanted)
        else:
            for wanted in permutation:
                found = row.find(wanted)
                if found >= 0:
                    break
        tie = row.find(wanted, found + 1)
        if tie < 0:
            return found
        seeds = self._seeds
        best, weight = found, (seeds[found] ^ mixed) * _ODD & _MASK
        while tie >= 0:
            other = (seeds[tie] ^ mixed) * _ODD & _MASK
            if other > weight:
                best, weight = tie, other
            tie = row.find(wanted, tie + 1)
        return best


class _Table:
    """What one snapshot says about one model, prepared for many requests."""

    __slots__ = ("engines", "hashed", "model", "role", "snapshot", "targets")

    def __init__(self, snapshot: RoleSnapshot, model: ModelEntry, older: _Table | None) -> None:
        self.snapshot = snapshot
        self.model = model
        self.role = snapshot.role
        same = older is not None and older.model is model
        self.engines: Sequence[EngineEntry] = (
            older.engines if older is not None and same else [e for e in model.engines if e.routable]
        )
        self.targets: list[RouteTarget | None] = [None] * max(1, len(self.engines))
        self.hashed: Rendezvous | None = older.hashed if older is not None and same else None

    def pick(self, affinity_key: str) -> int:
        if self.hashed is None:
            scope = f"{self.role.value}\0{self.model.name}"
            self.hashed = Rendezvous(scope, [engine.engine_id for engine in self.engines])
        return self.hashed.choose(affinity_key)

    def target(self, index: int) -> RouteTarget:
        ready = self.targets[index]
        if ready is None:
            engine = self.engines[index]
            ready = self._make(engine.base_url or "", engine.engine_id, engine.generation, engine.external)
            self.targets[index] = ready
        return ready

    def routed(self) -> RouteTarget:
        """The router's target; `router_url` is known to be there."""
        ready = self.targets[0]
        if ready is None:
            ready = self.targets[0] = self._make(self.model.router_url or "", None, None)
        return ready

    def _make(self, url: str, engine_id: str | None, generation: int | None, external: bool = False) -> RouteTarget:
        snapshot = self.snapshot
        return RouteTarget(
            role=snapshot.role,
            model=self.model.name,
            url=url,
            engine_id=engine_id,
            generation=generation,
            epoch=snapshot.epoch,
            revision=snapshot.revision,
            served_model_name=self.model.served_model_name,
            external=external,
        )


class RouteResolver:
    """Resolves requests of all roles of one process. Not for several threads at once."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Role, str], _Table] = {}
        self._cursors: dict[tuple[Role, str], int] = {}
        self._epochs: dict[Role, str] = {}

    def resolve(
        self,
        snapshot: RoleSnapshot,
        model: object = None,
        route_key: object = None,
        affinity_key: object = None,
    ) -> RouteTarget:
        """The target of one request; None means "not given".

        Raises BadRequest (400) for what the request says, Unavailable (503) for what the role cannot do now.
        """
        name = resolve_model(snapshot, model, route_key)
        if affinity_key is None:
            if snapshot.routing.policy is Policy.AFFINITY:
                raise BadRequest(
                    f"{snapshot.role} routes by affinity and the request has no affinity key;"
                    " send the header X-SMG-Routing-Key"
                )
        elif not isinstance(affinity_key, str) or not affinity_key:
            raise _ill_typed("affinity key", affinity_key)
        slot = (snapshot.role, name)
        table = self._tables.get(slot)
        if table is None or table.snapshot is not snapshot:
            table = self._table(snapshot, slot)
        entry = table.model
        if entry.state is not ReplicaState.READY:
            raise _not_ready(snapshot, entry)
        if entry.route_mode is RouteMode.SGLANG_ROUTER:
            if entry.router_url is None:
                raise Unavailable(f"{snapshot.role} model {name!r} is routed but publishes no router URL")
            return table.routed()
        count = len(table.engines)
        if not count:
            raise Unavailable(f"{snapshot.role} model {name!r} has no replica that takes requests; try again later")
        if affinity_key is not None:
            return table.target(table.pick(affinity_key))
        cursor = self._cursors.get(slot, 0)
        self._cursors[slot] = cursor + 1
        return table.target(cursor % count)

    def ready_model(self, snapshot: RoleSnapshot, model: object = None, route_key: object = None) -> ModelEntry:
        """The model that a request means, if it is READY; takes no turn. Raises like `resolve`."""
        entry = snapshot.models[resolve_model(snapshot, model, route_key)]
        if entry.state is not ReplicaState.READY:
            raise _not_ready(snapshot, entry)
        return entry

    def _table(self, snapshot: RoleSnapshot, slot: tuple[Role, str]) -> _Table:
        role, name = slot
        if self._epochs.get(role) != snapshot.epoch:
            # A new coordinator may know other models: forget all that was kept for the role.
            self._epochs[role] = snapshot.epoch
            self._cursors = {key: value for key, value in self._cursors.items() if key[0] is not role}
            self._tables = {key: value for key, value in self._tables.items() if key[0] is not role}
        table = _Table(snapshot, snapshot.models[name], self._tables.get(slot))
        self._tables[slot] = table
        return table


def resolve_model(snapshot: RoleSnapshot, model: object = None, route_key: object = None) -> str:
    """The model id that a request means; BadRequest when it means none."""
    if model is not None and (not isinstance(model, str) or not model):
        raise _ill_typed("model", model)
    if route_key is not None and (not isinstance(route_key, str) or not route_key):
        raise _ill_typed("route_key", route_key)
    routing = snapshot.routing
    if isinstance(model, str):
        if model in snapshot.models:
            return model
        return _looked_up(snapshot, "model", model, routing.aliases)
    if isinstance(route_key, str):
        return _looked_up(snapshot, "route_key", route_key, routing.route_key_map)
    return routing.default_model


def _looked_up(snapshot: RoleSnapshot, what: str, name: str, table: Mapping[str, str]) -> str:
    found = table.get(name)
    if found is None:
        known = sorted({*snapshot.models, *table} if what == "model" else table)[:20]
        there = f"known are {', '.join(known)}" if known else "there are none"
        raise BadRequest(f"{snapshot.role} has no {what} {name[:200]!r}; {there}")
    return found


def _not_ready(snapshot: RoleSnapshot, model: ModelEntry) -> Unavailable:
    # A sleeping model is woken by its role's lease and by nothing else, least of all by another request.
    then = "it wakes when its role is given the lease" if model.state == "SLEEPING" else "try again later"
    return Unavailable(f"{snapshot.role} model {model.name!r} is {model.state}, not READY; {then}")


def _ill_typed(what: str, seen: object) -> BadRequest:
    return BadRequest(f"{what} must be a non-empty string, seen {seen!r:.100}; leave it out for the default")
