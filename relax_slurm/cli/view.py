"""The state document as text: what `status` and `top` show."""

from __future__ import annotations

from typing import Any

from relax_slurm.cli.common import table

MAX_LINES = 64


def view(state: dict[str, Any]) -> str:
    """Run, roles, replicas and nodes; long lists are cut and counted."""
    jobs = f"  {_jobs(state['job_ids'])}" if state.get("job_ids") else ""
    lines = [f"{state['run']}  attempt {state['attempt']}  {state['state']}{jobs}  epoch {state.get('epoch') or '-'}"]
    if state.get("reason"):
        lines.append(f"reason   {state['reason']}")
    if state.get("error"):
        lines.append(f"error    {state['error']['message']}")
    if state.get("gateway_url") and state["state"] not in ("STOPPED", "FAILED"):
        lines.append(f"gateway  {state['gateway_url']}  token {state['token_file']}")
    lines.append(f"files    {state['run_dir']}")
    for title, rows, columns in (
        ("roles", _roles(state), ("role", "lease", "model", "state", "ready", "revision")),
        ("replicas", _replicas(state), ("replica", "role", "state", "gen", "in_flight", "memory", "nodes", "url")),
        ("nodes", _nodes(state), ("node", "state", "heard", "workers")),
    ):
        if rows:
            lines += ["", title, table(rows, columns, limit=MAX_LINES)]
    return "\n".join(lines)


def _jobs(ids: list[str]) -> str:
    """The leader's id, which every Slurm command takes, and how many components it has."""
    return f"job {ids[0]}" + (f" ({len(ids)} components: {', '.join(ids)})" if len(ids) > 1 else "")


def _roles(state: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for role, snapshot in state["roles"].items():
        for name, model in snapshot["models"].items():
            ready = sum(engine["state"] == "READY" for engine in model["engines"])
            rows.append(
                {
                    "role": role,
                    "lease": state["leases"].get(role, "-"),
                    "model": name,
                    "state": model["state"],
                    "ready": f"{ready}/{len(model['engines'])}",
                    "revision": str(snapshot["topology_revision"]),
                }
            )
    return rows


def _replicas(state: dict[str, Any]) -> list[dict[str, str]]:
    workers = {worker["worker_id"]: worker for node in state["nodes"] for worker in node["workers"]}
    rows = []
    for replica in state["replicas"]:
        head = workers.get(f"{replica['replica']}#0", {})
        memory = head.get("memory_bytes")
        rows.append(
            {
                "replica": replica["replica"],
                "role": replica["role"],
                "state": replica["state"],
                "gen": str(replica["generation"]),
                "in_flight": str(head.get("in_flight", "-")),
                "memory": "-" if memory is None else f"{memory / 2**30:.1f}G",
                "nodes": ",".join(replica["nodes"]),
                "url": replica["base_url"] or "-",
            }
        )
    return rows


def _nodes(state: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "node": node["node"],
            "state": node["state"],
            "heard": "-" if node["heard_seconds_ago"] is None else f"{node['heard_seconds_ago']:.1f}s ago",
            "workers": ", ".join(f"{worker['worker_id']} {worker['state']}" for worker in node["workers"]),
        }
        for node in state["nodes"]
    ]
