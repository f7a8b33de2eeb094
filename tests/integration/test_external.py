"""Engines that somebody else runs, beside a run's own: looked at, published, asked, and never touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_slurm import resources
from relax_slurm.client.inference import InferenceClient
from relax_slurm.client.sync import SyncInferenceClient
from relax_slurm.client.weights import SyncWeightsClient
from relax_slurm.core.plan import Role
from relax_slurm.wire.client import RemoteError
from sidecars.worker import WorkerSpec
from tests.contract.engine_program import launch, worker
from tests.harness.launch import LaunchedRun, command_line
from tests.harness.sites import LOCAL, NewRun, small
from tests.harness.wait import until

pytestmark = pytest.mark.parametrize("site", [LOCAL], indirect=True)
KEY = "somebody-elses-key"
PROMPT = {"text": "What is next?", "sampling_params": {"max_new_tokens": 8}}


def foreign(tmp: Path, **changes: Any) -> WorkerSpec:
    """An engine that no run knows, which wants a key."""
    tmp.mkdir(exist_ok=True)
    fields = {"role": Role.TEACHER, "model_path": "sim/foreign", "api_key": KEY, "served_model_name": "theirs"}
    return worker(tmp, **{**fields, **changes})


def with_teacher(spec: WorkerSpec, key_file: Path) -> dict[str, Any]:
    """A rollout and a judge of our own, and a teacher that is not."""
    body = small(control={"external_seconds": 0.1})
    engine = {"url": spec.base_url, "api_key_file": str(key_file)}
    body["roles"]["teacher"] = {"models": {"math": {"served_model_name": "theirs", "external": [engine]}}}
    return body


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    return path


def teacher_of(run: LaunchedRun) -> dict[str, Any]:
    model: dict[str, Any] = run.http().get("/teacher/engines").raise_for_status().json()["models"]["math"]
    return model


def test_a_teacher_of_somebody_else(new: NewRun, tmp_path: Path, key_file: Path) -> None:
    spec = foreign(tmp_path / "theirs")
    run = new(with_teacher(spec, key_file))
    with launch(spec) as engine:
        document = run.up()
        assert document["state"] == "READY"
        assert set(document["leases"]) == {"rollout", "genrm", "training"}, "what has no GPU has no lease"
        model = teacher_of(run)
        assert (model["state"], model["route_mode"], model["weight_source"]) == ("READY", "DIRECT", "STATIC")
        assert model["engines"] == [
            {
                "engine_id": "math/external-0",
                "base_url": spec.base_url,
                "state": "READY",
                "direct_eligible": True,
                "generation": 1,
                "external": True,
            }
        ]
        http = run.http()
        assert http.post("/teacher/generate", json=PROMPT).raise_for_status().json()["text"]
        chat = {"model": "math", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert http.post("/teacher/v1/chat/completions", json=chat).raise_for_status().json()["model"] == "math"
        deadly = http.post("/teacher/generate", json={"input_ids": [-1]})
        assert deadly.status_code == 400, "no guard stands in front, so the gateway looks"
        own = run.run_dir.engine_key_file.read_text().strip()
        keys = {(Role.TEACHER, "math/external-0"): KEY}

        def client(**options: Any) -> SyncInferenceClient:
            return SyncInferenceClient(
                lambda: InferenceClient.polling(run.gateway_url, run.token, engine_key=own, **options)
            )

        with client(external_keys=keys) as direct, client() as without:
            assert direct.generate(PROMPT, Role.TEACHER)["text"]
            assert direct.generate(PROMPT, Role.ROLLOUT)["text"]
            with pytest.raises(Exception, match="401"):
                without.generate(PROMPT, Role.TEACHER)
        with (
            SyncWeightsClient(run.run_dir.path) as trainer,
            pytest.raises(RemoteError, match="no model teacher/math is managed here"),
        ):
            trainer.update_weights_from_disk("math", str(tmp_path), "1", role="teacher")
        for verb in (["status"], ["top", "--once"]):
            shown = run.call(*verb)
            assert shown.rc == 0, shown.said
            assert "math" in shown.out
        assert KEY not in run.logs() + _everything(run)
        assert engine.process.poll() is None
    until(lambda: teacher_of(run)["state"] == "FAILED", 20.0, run.logs)
    answer = http.post("/teacher/generate", json=PROMPT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    run.wait_state("DEGRADED")
    assert http.post("/rollout/generate", json=PROMPT).status_code == 200, "nothing else of the run minds"
    with launch(spec) as engine:
        until(lambda: teacher_of(run)["state"] == "READY", 30.0, run.logs)
        assert teacher_of(run)["engines"][0]["generation"] == 2
        run.wait_state("READY")
        assert http.post("/teacher/generate", json=PROMPT).status_code == 200
        assert run.call("stop").rc == 0
        run.nothing_left()
        assert engine.process.poll() is None, "never ours to end"
        assert engine.post("/generate", PROMPT).status_code == 200


def _everything(run: LaunchedRun) -> str:
    """All files of the run, as one text."""
    paths = [path for path in run.run_dir.path.rglob("*") if path.is_file() and not path.is_symlink()]
    return "\n".join(path.read_text(errors="replace") for path in paths) + json.dumps(run.state())


def test_the_shipped_run_file(new: NewRun, tmp_path: Path) -> None:
    spec = foreign(tmp_path / "theirs", api_key=None)
    run = new(yaml.safe_load(resources.read("configs", "external.yaml")))
    with launch(spec):
        done = run.launch("--json", "--set", f'roles.teacher.models.math.external=["{spec.base_url}"]')
        assert done.rc == 0, done.said + run.logs()
        run.wait_state("READY")
        assert run.http().post("/teacher/generate", json=PROMPT).status_code == 200
    planned = command_line(run.site, "plan", str(run.config))
    assert planned.rc == 0, planned.said
    assert "math/external-0: somebody else's, http://127.0.0.1:30000" in planned.out


def test_one_that_is_not_there_does_not_stop_the_others(new: NewRun, tmp_path: Path, key_file: Path) -> None:
    spec = foreign(tmp_path / "theirs")
    run = new(with_teacher(spec, key_file))
    assert run.up()["state"] in ("READY", "DEGRADED")
    run.wait_state("DEGRADED")
    assert teacher_of(run)["state"] == "FAILED"
    (row,) = (run.state() or {})["externals"]
    assert spec.base_url.removeprefix("http://") in row["reason"]
    with launch(spec):
        run.wait_state("READY")
        assert run.http().post("/teacher/generate", json=PROMPT).status_code == 200


def test_without_its_key_the_run_does_not_start(new: NewRun, tmp_path: Path) -> None:
    spec = foreign(tmp_path / "theirs")
    body = with_teacher(spec, tmp_path / "nothing")
    done = new(body).launch("--json")
    assert done.rc == 6, done.said
    assert "api_key_file" in done.err


def test_rollout_of_somebody_else_beside_training(new: NewRun, tmp_path: Path) -> None:
    spec = foreign(tmp_path / "theirs", role=Role.ROLLOUT, api_key=None)
    body = small(placement="decoupled", control={"external_seconds": 0.1})
    body["roles"] = {"rollout": {"models": {"policy": {"external": [spec.base_url]}}}}
    run = new(body)
    with launch(spec) as engine:
        assert run.up()["state"] == "READY"
        model = run.http().get("/rollout/engines").json()["models"]["policy"]
        assert (model["weight_source"], model["weight_version"]) == ("ACTOR", "default")
        assert run.http().post("/rollout/generate", json=PROMPT).status_code == 200
        engine.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "7"})
        until(
            lambda: run.http().get("/rollout/engines").json()["models"]["policy"]["weight_version"] == "7",
            20.0,
            run.logs,
        )
        schema1 = run.http().get("/rollout/engines", params={"schema": 1}).json()
        assert schema1["total_engines"] == 1
        assert run.call("stop").rc == 0
        run.nothing_left()
        assert engine.process.poll() is None
