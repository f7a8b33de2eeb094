"""Parts of a borrowed allocation, and runs that keep apart in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.config.load import from_mapping
from relax_slurm.control.borrow import Choice, Share, ShareBook, choose, step_label
from relax_slurm.core.placement import plan
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.errors import StartupFailed


def plan_of(*pools: tuple[int, int], head: bool = False) -> InferencePlacementPlan:
    """A decoupled plan with a pool of (nodes, GPUs) per role."""
    roles = ("rollout", "genrm", "teacher")
    return plan(
        from_mapping(
            {
                "name": "mine",
                "placement": "decoupled",
                "job_shape": "het" if len(pools) > 1 or head else "single",
                "pools": {
                    role: {"nodes": nodes, "gpus_per_node": gpus}
                    for role, (nodes, gpus) in zip(roles, pools, strict=False)
                },
                "roles": {
                    role: {"pool": role, "models": {"m": {"model_path": "p", "gpus": nodes * gpus}}}
                    for role, (nodes, gpus) in zip(roles, pools, strict=False)
                },
                **({"head": {}} if head else {}),
            }
        )
    )


def share(run: str, **gpus: tuple[int, ...]) -> Share:
    return Share(run=run, label=step_label(run, 1), gpus=gpus)


EIGHT = dict.fromkeys(("n1", "n2", "n3", "n4"), 8)
ALL = [("n1", "n2", "n3", "n4")]


def test_an_allocation_of_the_plans_shape_is_used_as_it_is() -> None:
    choice = choose(plan_of((1, 8), (2, 4)), [("n1",), ("n2", "n3")], EIGHT | {"n2": 4, "n3": 4}, [], "n1")
    assert choice.nodes == (("n1",), ("n2", "n3"))
    assert choice.first_gpu == {"n1": 0, "n2": 0, "n3": 0}


def test_part_of_the_nodes_and_part_of_the_gpus() -> None:
    choice = choose(plan_of((2, 4)), ALL, EIGHT, [], "n1")
    assert choice == Choice((("n1", "n2"),), {"n1": 0, "n2": 0}, {"n1": (0, 1, 2, 3), "n2": (0, 1, 2, 3)})


def test_a_second_run_takes_the_gpus_that_are_left_and_a_third_other_nodes() -> None:
    first = share("a", n1=(0, 1, 2, 3), n2=(0, 1, 2, 3))
    second = choose(plan_of((2, 4)), ALL, EIGHT, [first], "n1")
    assert (second.nodes, second.first_gpu) == ((("n1", "n2"),), {"n1": 4, "n2": 4})
    third = choose(plan_of((2, 8)), ALL, EIGHT, [first, share("b", **second.gpus)], "n1")
    assert third.nodes == (("n3", "n4"),)


def test_a_het_plan_fits_into_an_ordinary_allocation_with_a_node_for_each_component() -> None:
    choice = choose(plan_of((1, 8), (2, 8), head=True), ALL, EIGHT, [], "n3")
    assert choice.nodes == (("n3",), ("n1",), ("n2", "n3"))
    assert set(choice.gpus) == {"n1", "n2", "n3"}


def test_components_that_do_not_match_are_looked_for_anywhere() -> None:
    choice = choose(plan_of((2, 8), (1, 8)), [("n1",), ("n2", "n3")], EIGHT, [], None)
    assert choice.nodes == (("n1", "n2"), ("n3",))


@pytest.mark.parametrize(
    ("wanted", "shares", "words"),
    [
        ((5, 8), [], "has 4 nodes with 8 GPUs, the plan of mine wants 5 nodes with 8 GPUs more and 4 are free"),
        ((1, 16), [], "wants 1 nodes with 16 GPUs more and 0 are free"),
        ((4, 8), [share("a", n1=(7,))], "3 are free; runs a use a part of it"),
        ((1, 5), [share("a", **{f"n{n}": (4,) for n in range(1, 5)})], "0 are free; runs a"),
    ],
)
def test_what_is_too_small_is_refused_with_numbers(wanted: tuple[int, int], shares: list[Share], words: str) -> None:
    with pytest.raises(StartupFailed) as caught:
        choose(plan_of(wanted), ALL, EIGHT, shares, "n1")
    assert words in caught.value.message


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8])), max_size=12))
def test_runs_in_one_allocation_never_share_a_gpu(wishes: list[tuple[int, int]]) -> None:
    shares: list[Share] = []
    seen: set[tuple[str, int]] = set()
    for number, wish in enumerate(wishes):
        try:
            choice = choose(plan_of(wish), ALL, EIGHT, shares, "n1")
        except StartupFailed:
            continue
        mine = {(node, gpu) for node, gpus in choice.gpus.items() for gpu in gpus}
        assert len(mine) == wish[0] * wish[1]
        assert not mine & seen
        assert all(gpu < 8 for _, gpu in mine)
        seen |= mine
        shares.append(share(f"r{number}", **choice.gpus))


# --- the book ------------------------------------------------------------------------------------------------------

HOLD = (
    "import sys; from pathlib import Path; from relax_slurm.control.borrow import Share, ShareBook\n"
    "book = ShareBook(Path(sys.argv[1]), '7', 'a')\n"
    "book.take(Share(run='a', label='-a.1', gpus={'n1': (0,)}))\n"
    "print('held', flush=True); sys.stdin.read()\n"
)


def test_a_share_counts_while_its_supervisor_lives_or_its_steps_do_or_nobody_knows(tmp_path: Path) -> None:
    folder = tmp_path / ".borrowed" / "7"
    book = ShareBook(tmp_path, "7", "b")
    with book.open():
        assert book.others([]) == []
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert [entry.run for entry in book.others([])] == ["a"]
        assert ShareBook(tmp_path, "7", "a").others([]) == [], "its own share is no obstacle"
        assert ShareBook(tmp_path, "8", "b").others(None) == [], "another allocation"
        with pytest.raises(StartupFailed, match="already"):
            ShareBook(tmp_path, "7", "a").take(share("a"))
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()
    assert book.others([]) == []
    assert [entry.run for entry in book.others(["sidecar-n1-a.1"])] == ["a"]
    assert [entry.run for entry in book.others(None)] == ["a"], "doubt is no release"
    (folder / "a.json").write_text("{")
    with pytest.raises(StartupFailed, match="cannot be read"):
        book.others([])


def test_an_open_book_is_not_opened_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_slurm.control.borrow.BOOK_SECONDS", 0.05)
    book: Any = ShareBook(tmp_path, "7", "a")
    with book.open(), pytest.raises(StartupFailed, match="another run of this allocation"), book.open():
        pass
