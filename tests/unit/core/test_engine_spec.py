"""Who may do what: the table, row by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.engine_spec import SERVING, WEIGHT_CHANGES, Operation, OperationRefused, spec_for
from relax_slurm.core.plan import Role, WeightSource
from relax_slurm.errors import PlanRefused


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("operation", list(Operation))
def test_a_static_engine_serves_and_never_changes(role: Role, operation: Operation) -> None:
    spec = spec_for(role, WeightSource.STATIC)
    assert spec.strict_drain
    if operation in SERVING:
        spec.check(operation)
        return
    with pytest.raises(OperationRefused) as caught:
        spec.check(operation)
    assert operation.value in caught.value.message
    assert "STATIC" in caught.value.message
    assert caught.value.http_status == 409


@pytest.mark.parametrize("role", [Role.GENRM, Role.TEACHER])
@pytest.mark.parametrize("source", [WeightSource.ACTOR, WeightSource.DCS])
def test_judges_and_teachers_are_static(role: Role, source: WeightSource) -> None:
    with pytest.raises(PlanRefused, match="STATIC"):
        spec_for(role, source)


def test_actor_weights_come_from_the_trainer() -> None:
    spec = spec_for(Role.ROLLOUT, WeightSource.ACTOR)
    allowed = {operation for operation in Operation if spec.allows(operation)}
    assert allowed == set(Operation) - {Operation.DCS}
    assert not spec.strict_drain
    assert not spec.overrides


def test_dcs_weights_come_from_the_service() -> None:
    spec = spec_for(Role.ROLLOUT, WeightSource.DCS)
    assert spec.allows(Operation.DCS)
    assert not spec.allows(Operation.UPDATE_WEIGHTS_TENSOR)
    assert not spec.allows(Operation.UPDATE_WEIGHTS_DISTRIBUTED)


def test_only_static_engines_keep_their_weights_in_host_memory() -> None:
    assert dict(spec_for(Role.TEACHER, WeightSource.STATIC).overrides) == {"enable_weights_cpu_backup": True}


@given(st.sampled_from(WeightSource), st.sampled_from(Operation))
def test_every_source_serves_and_the_two_sets_are_a_partition(source: WeightSource, operation: Operation) -> None:
    spec = spec_for(Role.ROLLOUT, source)
    assert spec.operations >= SERVING
    assert (operation in SERVING) is not (operation in WEIGHT_CHANGES)
