"""How many token ids an engine knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.errors import Unavailable
from relax_slurm.forward import Response
from relax_slurm.forward.http import Headers
from sidecars.engine_http import EngineHttp
from sidecars.vocabulary import configured, vocabulary
from tests.contract.engine_program import worker

REFUSAL = {"error": {"message": "logit_bias must has keys in [0, 151935], got -1."}}


class Answers:
    """An upstream with prepared answers by path; others fail."""

    def __init__(self, **answers: tuple[int, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def request(
        self,
        method: str,
        url: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout_seconds: float = 10.0,
    ) -> Response:
        name = url.rpartition("/")[2]
        self.asked.append(name)
        if name not in self.answers:
            raise Unavailable("nobody there")
        status, value = self.answers[name]
        return Response(status, Headers(), json.dumps(value).encode())


def found(tmp: Path, upstream: Answers, **changes: Any) -> int | None:
    spec = worker(tmp, **{"program": "sglang", "model_path": str(tmp), "env": {"HF_HOME": str(tmp)}, **changes})
    return asyncio.run(vocabulary(spec, EngineHttp(spec, upstream)))


def test_model_info_is_believed(tmp_path: Path) -> None:
    upstream = Answers(model_info=(200, {"vocab_size": 7}), generate=(400, REFUSAL))
    assert found(tmp_path, upstream) == 7
    assert upstream.asked == ["model_info"]


def test_a_refusal_names_the_last_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    upstream = Answers(model_info=(200, {"vocab_size": None}), generate=(400, REFUSAL))
    assert found(tmp_path, upstream) == 151_936


@pytest.mark.parametrize(
    "answers",
    [{}, {"generate": (200, {"text": "a"})}, {"generate": (400, {"error": "?"})}, {"model_info": (200, [])}],
)
def test_the_configuration_is_the_last_resort(tmp_path: Path, answers: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    assert found(tmp_path, Answers(**answers)) == 5
    (tmp_path / "config.json").unlink()
    assert found(tmp_path, Answers(**answers)) is None


def test_a_simulated_engine_has_what_it_was_told(tmp_path: Path) -> None:
    assert found(tmp_path, Answers(), program="sim") == 512
    assert found(tmp_path, Answers(), program="sim", sim={"vocab_size": 1024}) == 1024


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 9}', 9),
        ('{"text_config": {"vocab_size": 9}}', 9),
        ('{"thinker_config": {"text_config": {"vocab_size": 9}}}', 9),
        ('{"vocab_size": true, "llm_config": {"vocab_size": 9}}', 9),
        ('{"vocab_size": "9"}', None),
        ('{"text_config": {}}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_configurations(tmp_path: Path, config: str, size: int | None) -> None:
    (tmp_path / "config.json").write_text(config)
    assert configured(str(tmp_path), {"HF_HOME": str(tmp_path)}) == size


def test_a_hub_model_is_read_from_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc\n")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text('{"vocab_size": 9}')
    assert configured("org/name", {"HF_HOME": str(tmp_path)}) == 9
    assert configured("org/name", {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": "/none"}) == 9
    assert configured("org/other", {"HF_HOME": str(tmp_path)}) is None
