"""Engine arguments: spelling, ownership, command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.config.engine_args import ALIASES, OWNED, canonical, normalise, owned_reason, to_argv


@pytest.mark.parametrize("key", ["tp_size", "tp-size", "--tp-size", "tp", "tensor_parallel_size", " --tp_size "])
def test_spellings_are_one_key(key: str) -> None:
    assert normalise({key: 2}) == {"tp_size": 2}


@pytest.mark.parametrize("name", sorted(OWNED))
@pytest.mark.parametrize(
    "spell", [str, lambda name: name.replace("_", "-"), lambda name: "--" + name.replace("_", "-")]
)
def test_owned_arguments_are_refused_with_the_reason(name: str, spell: object) -> None:
    assert callable(spell)
    with pytest.raises(ValueError, match=f"sets {name}, which the tool owns: ") as caught:
        normalise({spell(name): 1})
    assert OWNED[name] in str(caught.value)


@pytest.mark.parametrize("key", ["base_gpu", "--nccl-p", "dist_init", "node_r", "served_model", "enable_memory"])
def test_shortened_owned_arguments_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="shortened"):
        normalise({key: 1})


@pytest.mark.parametrize(
    "key",
    ["mem_fraction_static", "context_length", "device", "enable_dp_attention", "enable_metrics", "log_level", "dp"],
)
def test_other_arguments_pass(key: str) -> None:
    assert owned_reason(key) is None


def test_two_spellings_of_one_argument_are_refused() -> None:
    with pytest.raises(ValueError, match="sets tp_size twice"):
        normalise({"tp_size": 2, "--tp-size": 4})


@pytest.mark.parametrize("key", ["", "--", "a b", "a=b", "é", "1x", "a\nb"])
def test_impossible_names_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is not an argument name"):
        normalise({key: 1})


@pytest.mark.parametrize("value", [0, -1, "2", True, 1.5, None, [2]])
def test_parallel_sizes_are_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        normalise({"pp_size": value})


def test_too_many_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        normalise({f"x{number}": 1 for number in range(300)})


def test_command_line() -> None:
    args = {"a_b": 1, "flag": True, "off": False, "none": None, "many": ["x", 2], "map": {"k": 1.5}, "t": "a b"}
    assert to_argv(args) == ["--a-b", "1", "--flag", "--many", "x", "2", "--map", '{"k":1.5}', "--t", "a b"]


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z_0-9]{0,12}", fullmatch=True), st.integers(1, 9), max_size=6))
def test_normalising_twice_changes_nothing(args: dict[str, int]) -> None:
    try:
        once = normalise(args)
    except ValueError:
        return
    assert normalise(once) == once
    assert all(canonical(key) == key for key in once)
    assert not set(once) & (set(OWNED) | set(ALIASES))
