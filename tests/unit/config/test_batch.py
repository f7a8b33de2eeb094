"""The batch section: defaults that work, and what is refused as shape."""

from __future__ import annotations

from typing import Any

import pytest

from relax_slurm.config.batch import BatchConfig
from relax_slurm.config.load import from_mapping, from_resolved
from relax_slurm.errors import ConfigError
from tests.unit.config.test_models import run


def test_it_may_be_left_out_and_survives_json() -> None:
    assert from_mapping(run()).batch is None
    config = from_mapping(run(batch={"teacher": {"selection": "union"}, "student_scoring": True}))
    assert config.batch is not None
    assert config.batch.sampling == {"temperature": 1.0, "max_new_tokens": 256}
    assert config.batch.teacher is not None
    assert config.batch.teacher.top_k == 8
    assert from_resolved(config.resolved_json()) == config
    assert BatchConfig() == from_mapping(run(batch={})).batch


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"batch_sise": 4}, "did you mean 'batch_size'"),
        ({"batch_size": 0}, "batch.batch_size"),
        ({"oversample": 3, "batch_size": 4}, "oversample 3 below batch_size 4"),
        ({"sampling": {"n": 4}}, "use batch.n_samples_per_prompt"),
        ({"sampling": {"sampling_seed": 4}}, "use batch.seed"),
        ({"sampling": {"no_stop_trim": False}}, "always true"),
        ({"sampling": {"Top P": 1}}, "no sampling parameter"),
        ({"student_scoring": True}, "without candidates to score"),
        ({"student_scoring": True, "teacher": {}}, "without candidates to score"),
        ({"teacher": {"selection": "all"}}, "selection"),
        ({"publisher": {"format": "pickle"}}, "publisher.format"),
        ({"publisher": {"root": "a#b"}}, "publisher.root"),
        ({"job": {"custom_reward": "not a name"}}, "custom_reward"),
    ],
)
def test_refused(batch: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(run(batch=batch), "run.yaml")
    assert match in caught.value.message
    assert caught.value.message.startswith("run.yaml:batch")
