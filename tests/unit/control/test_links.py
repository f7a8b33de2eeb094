"""Commands in flight: sent again, bound to one sidecar process, answered once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.control.links import CommandFailed, CommandUnanswered, NodeGone, NodeLinks
from relax_slurm.wire.messages import Method, Result
from tests.unit.control.stage import EPOCH, run, until


class Wire:
    """What was sent where; a send to an address in `broken` does not arrive."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, dict[str, Any]]] = []
        self.broken: set[bytes] = set()
        self.now = 0.0

    async def send(self, identity: bytes, body: dict[str, Any]) -> bool:
        if identity in self.broken:
            return False
        self.sent.append((identity, body))
        return True

    def links(self, *nodes: str, resend: tuple[float, float] = (0.02, 0.05)) -> NodeLinks:
        links = NodeLinks(nodes, EPOCH, self.send, lambda: asyncio.get_running_loop().time(), resend_seconds=resend)
        for node in nodes:
            arrive(links, node, "i1", node.encode())
        return links


def arrive(links: NodeLinks, node: str, incarnation: str, identity: bytes) -> None:
    links.nodes[node].incarnation, links.nodes[node].identity = incarnation, identity


def result(operation: str, *, ok: bool = True, **fields: Any) -> Result:
    return Result(kind="result", id=operation, node="n", incarnation="i1", epoch=EPOCH, ok=ok, **fields)


def order(links: NodeLinks, operation: str = "o1", node: str = "n", seconds: float = 5.0) -> asyncio.Task[Any]:
    return asyncio.create_task(
        links.command(node, Method.OFFLOAD, {"a": 1}, operation_id=operation, timeout_seconds=seconds)
    )


def test_a_command_is_repeated_under_its_id_until_there_is_a_result() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        task = order(links)
        await until(lambda: len(wire.sent) >= 3)
        assert {identity for identity, _ in wire.sent} == {b"n"}
        assert all(body == wire.sent[0][1] for _, body in wire.sent)
        assert wire.sent[0][1] == {
            "kind": "command", "id": "o1", "epoch": EPOCH, "method": "offload", "args": {"a": 1},
        }  # fmt: skip
        links.resolve(links.nodes["n"], result("o1", value={"x": 2}))
        assert await task == {"x": 2}
        assert not links.nodes["n"].pending
        links.resolve(links.nodes["n"], result("o1", value={"x": 3}))  # late: nobody waits any more

    run(scenario)


def test_repetition_becomes_rarer() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n", resend=(0.01, 10.0))
        task = order(links, seconds=0.5)
        with pytest.raises(CommandUnanswered):
            await task
        assert len(wire.sent) <= 7  # 0, 10, 30, 70, 150, 310 ms

    run(scenario)


def test_a_refusal_is_raised_with_the_sidecars_code() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        task = order(links)
        await until(lambda: wire.sent)
        links.resolve(links.nodes["n"], result("o1", ok=False, error={"code": "exited", "message": "gone"}))
        with pytest.raises(CommandFailed, match="offload on n: gone") as caught:
            await task
        assert caught.value.remote_code == "exited"
        other = order(links, "o2")
        await until(lambda: wire.sent[-1][1]["id"] == "o2")
        links.resolve(links.nodes["n"], result("o2", ok=False))
        with pytest.raises(CommandFailed, match="no reason given"):
            await other

    run(scenario)


def test_no_result_in_time_leaves_doubt() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        with pytest.raises(CommandUnanswered, match="stay fenced") as caught:
            await order(links, seconds=0.05)
        assert caught.value.exit_code == 9

    run(scenario)


def test_a_result_that_is_there_at_the_deadline_counts() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")

        async def send(identity: bytes, body: dict[str, Any]) -> bool:
            links.resolve(links.nodes["n"], result("o1", value={"late": True}))
            return True

        links._send = send
        assert await links.command("n", Method.OFFLOAD, {}, operation_id="o1", timeout_seconds=0.0) == {"late": True}

    run(scenario)


def test_only_the_node_that_was_asked_can_answer() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n", "other")
        task = order(links, seconds=0.1)
        await until(lambda: wire.sent)
        links.resolve(links.nodes["other"], result("o1", value={"forged": True}))
        with pytest.raises(CommandUnanswered):
            await task

    run(scenario)


def test_a_new_connection_gets_what_may_be_lost_at_once() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n", resend=(60.0, 60.0))
        task = order(links)
        await until(lambda: len(wire.sent) == 1)
        await links.follow(links.nodes["n"], b"n")
        assert len(wire.sent) == 1  # the same address: nothing to do
        await links.follow(links.nodes["n"], b"new")
        assert [identity for identity, _ in wire.sent] == [b"n", b"new"]
        links.resolve(links.nodes["n"], result("o1"))
        assert await task == {}

    run(scenario)


def test_a_command_never_moves_on_to_the_next_sidecar() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        link = links.nodes["n"]
        task = order(links)
        await until(lambda: wire.sent)
        links.retire(link, "its sidecar was replaced")
        assert (link.identity, link.incarnation, list(link.former)) == (None, "", ["i1"])
        arrive(links, "n", "i2", b"n2")
        with pytest.raises(NodeGone, match="offload on n: its sidecar was replaced"):
            await task
        assert b"n2" not in {identity for identity, _ in wire.sent}

    run(scenario)


def test_a_command_for_a_node_that_is_coming_waits_for_it() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        link = links.nodes["n"]
        links.retire(link, "its step ended")
        task = order(links)
        await asyncio.sleep(0.1)
        assert not wire.sent
        links.retire(link, "again")  # still not sent to anybody, so nobody took it along
        link.incarnation = "i2"
        await links.follow(link, b"n2")
        assert [identity for identity, _ in wire.sent] == [b"n2"]
        links.resolve(link, result("o1"))
        assert await task == {}

    run(scenario)


def test_a_lost_node_answers_at_once_that_it_is_gone() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        link = links.nodes["n"]
        link.identity = None
        task = order(links)
        await asyncio.sleep(0)
        link.lost, link.step_ended = True, "the step of node n ended with code 1"
        links.retire(link, link.step_ended)
        with pytest.raises(NodeGone, match="ended with code 1"):
            await task
        with pytest.raises(NodeGone, match="ended with code 1"):
            await order(links, "o2")

    run(scenario)


def test_a_send_that_fails_is_tried_again() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        wire.broken.add(b"n")
        task = order(links)
        await asyncio.sleep(0.03)
        assert links.nodes["n"].pending["o1"].sent_to == ""
        wire.broken.clear()
        await until(lambda: wire.sent)
        assert links.nodes["n"].pending["o1"].sent_to == "i1"
        links.resolve(links.nodes["n"], result("o1"))
        await task

    run(scenario)


def test_a_withdrawn_command_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        task = order(links)
        await until(lambda: wire.sent)
        links.nodes["n"].pending["o1"].result.set_exception(NodeGone("unseen"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not links.nodes["n"].pending

    run(scenario)


def test_a_withdrawn_command_does_not_reach_a_sidecar_that_comes_in_the_same_breath() -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n")
        wire.broken.add(b"n")
        task = order(links, seconds=30.0)
        await until(lambda: links.nodes["n"].pending)
        task.cancel()  # its task hears of it only after whoever cancelled it has gone on
        await links.follow(links.nodes["n"], b"new")
        assert wire.sent == []
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)


def test_the_names_of_former_sidecars_are_bounded() -> None:
    links = NodeLinks(["n"], EPOCH, Wire().send, lambda: 0.0)
    for number in range(1000):
        links.nodes["n"].incarnation = f"i{number}"
        links.retire(links.nodes["n"], "x")
    assert len(links.nodes["n"].former) == 64
    assert links.owner_of("n", "i999") is None
    assert links.owner_of("n", "") is None
    assert links.owner_of("m", "i1") is None


@given(st.lists(st.sampled_from(["drop", "answer", "twice", "late", "replace", "reconnect"]), min_size=1, max_size=12))
def test_every_command_ends_exactly_once_whatever_the_network_does(script: list[str]) -> None:
    async def scenario() -> None:
        wire = Wire()
        links = wire.links("n", resend=(0.001, 0.002))
        link = links.nodes["n"]
        ended = []
        for number, what in enumerate(script):
            task = order(links, f"o{number}", seconds=0.02 if what in ("drop", "late") else 5.0)
            await until(lambda number=number: any(body["id"] == f"o{number}" for _, body in wire.sent))
            if what == "replace":
                links.retire(link, "replaced")
                arrive(links, "n", f"j{number}", b"j%d" % number)
            elif what == "reconnect":
                await links.follow(link, b"r%d" % number)
            if what in ("answer", "twice", "reconnect"):
                for _ in range(1 + (what == "twice")):
                    links.resolve(link, result(f"o{number}", value={"n": number}))
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if what == "late":
                links.resolve(link, result(f"o{number}"))
            ended.append(type(outcome))
        wanted = {"drop": CommandUnanswered, "late": CommandUnanswered, "replace": NodeGone}
        assert ended == [wanted.get(what, dict) for what in script]
        assert not link.pending

    run(scenario)
