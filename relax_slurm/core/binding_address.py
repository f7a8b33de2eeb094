"""Which address a node advertises.

Never one that leads somewhere else when another machine uses it: loopback (unless everything runs on one
machine) and addresses that two machines both have, such as a container bridge. Among the rest: the
interface the user named, then the address the node's kernel itself uses towards the head node, then one in
the head's subnet, then real interfaces before bridges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import ip_address, ip_interface

from relax_slurm.core.binding_types import HeadFacts, Problem
from relax_slurm.core.report import InterfaceAddress, NodeReport

BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "podman", "lxc", "lxd")


def _usable(address: str) -> bool:
    value = ip_address(address)
    return not (value.is_loopback or value.is_unspecified or value.is_link_local or value.is_multicast)


def _is_loopback(address: str | None) -> bool:
    return address is not None and ip_address(address).is_loopback


def _reported(report: NodeReport) -> tuple[InterfaceAddress, ...]:
    """The node's addresses; the one towards the head may be an alias missing from the interface list."""
    known = {entry.address for entry in report.addresses}
    if report.towards_head is None or report.towards_head in known:
        return report.addresses
    return (*report.addresses, InterfaceAddress(interface="route", address=report.towards_head))


def _shared(reports: Mapping[str, NodeReport], head: HeadFacts | None) -> set[str]:
    """Addresses that two different machines both report."""
    machines: dict[str, set[tuple[str, str, str]]] = {}
    for report in reports.values():
        for entry in _reported(report):
            machines.setdefault(entry.address, set()).add(report.host)
    if head is not None:
        for entry in head.addresses:
            machines.setdefault(entry.address, set()).add(head.host)
    return {address for address, hosts in machines.items() if len(hosts) > 1}


def _in_subnet(address: str, networks: tuple[InterfaceAddress, ...]) -> bool:
    value = ip_address(address)
    return any(
        entry.prefix is not None and value in ip_interface(f"{entry.address}/{entry.prefix}").network
        for entry in networks
    )


def _rank(
    towards_head: str | None, networks: tuple[InterfaceAddress, ...]
) -> Callable[[InterfaceAddress], tuple[bool, bool, bool]]:
    """A sort key: the smallest is advertised."""

    def key(entry: InterfaceAddress) -> tuple[bool, bool, bool]:
        bridge = entry.interface.startswith(BRIDGES)
        return entry.address != towards_head, not _in_subnet(entry.address, networks), bridge

    return key


def choose_addresses(
    reports: Mapping[str, NodeReport],
    *,
    head: HeadFacts | None = None,
    local: bool = False,
    interface: str | None = None,
) -> tuple[dict[str, str], list[Problem]]:
    """The advertised address per node, and a problem for every node that has none."""
    hosts = {report.host for report in reports.values()}
    one_host = local or (len(hosts) == 1 and (head is None or head.host in hosts))
    shared = _shared(reports, head)
    networks = (
        ()
        if head is None
        else tuple(entry for entry in head.addresses if _usable(entry.address) and entry.address not in shared)
    )
    chosen: dict[str, str] = {}
    problems: list[Problem] = []
    # A head that its nodes reach over loopback listens there only: nobody outside this machine is served anyway.
    inside = one_host and interface is None and all(_is_loopback(report.towards_head) for report in reports.values())
    for name, report in reports.items():
        if local or inside:
            chosen[name] = "127.0.0.1"
            continue
        found = [entry for entry in _reported(report) if _usable(entry.address) and entry.address not in shared]
        if interface is not None:
            found = [entry for entry in found if entry.interface == interface]
        if found:
            chosen[name] = min(found, key=_rank(report.towards_head, networks)).address
        elif one_host and interface is None:
            chosen[name] = "127.0.0.1"
        else:
            problems.append(_none(name, report, shared, interface))
    return chosen, problems


def _none(name: str, report: NodeReport, shared: set[str], interface: str | None) -> Problem:
    def remark(entry: InterfaceAddress) -> str:
        why = ", also on another machine" if entry.address in shared else ""
        return f"{entry.interface} {entry.address}{why}"

    return Problem(
        name,
        "no address that other machines can reach; name an interface in the run file or fix the network",
        source="interfaces" if interface is None else f"interface {interface}",
        seen="; ".join(remark(entry) for entry in report.addresses) or "no address",
        wanted="an address of its own that is not loopback",
    )
