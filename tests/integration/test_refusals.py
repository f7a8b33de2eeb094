"""Launches that do not succeed: one clear sentence, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import Site, command_line
from tests.harness.sites import FAKE, LOCAL, SLURM, NewRun, small

REFUSED = {
    "an unknown key": ({"slurm": {"partitoin": "x"}}, 2, "partition"),
    "a budget that does not divide": (
        {"roles": {"rollout": {"models": {"policy": {"gpus": 3, "gpus_per_engine": 2}}}}},
        3,
        "3",
    ),
    "a word that cuts the script": ({"slurm": {"comment": "my-hetjob"}}, 2, "hetjob"),
    "a port above the last": ({"ports": {"first": 65530, "last": 65535}}, 3, "65535"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_what_cannot_work_is_refused_in_one_sentence_before_anything_is_written(
    new: NewRun, site: Site, case: str
) -> None:
    changes, code, word = REFUSED[case]
    run = new(small(**changes))
    done = run.launch("--json")
    assert done.rc == code, done.said
    assert done.json["exit_code"] == code
    said = [line for line in done.err.splitlines() if line.strip()]
    assert len(said) == 1, done.err
    assert said[0].startswith("error: ")
    assert word in said[0]
    assert not run.exists


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_a_job_that_slurm_does_not_take_is_exit_4(new: NewRun, site: Site) -> None:
    run = new(small(pools={"actor": {"gpus_per_node": 9}}, training={"gpus": 18}))
    done = run.launch("--json")
    assert done.rc == 4, done.said
    assert done.json["error"]["code"] == "submission_refused"
    assert "gpus_per_node" in done.err, "says what to change"
    assert site.jobs() == []
    run.nothing_left()
    assert run.launch("--dry-run").rc == 0, "a refused attempt does not stand in the way of the next"


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_a_runs_root_that_cannot_be_written_is_one_clear_sentence(new: NewRun, site: Site, tmp_path: Path) -> None:
    if os.getuid() == 0:
        broken = Path("/proc/self/relax")  # root may write everywhere else
    else:
        broken = tmp_path / "closed"
        broken.mkdir()
        broken.chmod(stat.S_IRUSR | stat.S_IXUSR)
    run = new(small())
    done = command_line(site, "launch", str(run.config), "--backend", "local", "--json", RELAX_RUNS_ROOT=str(broken))
    assert done.rc == 2, done.said
    assert "Traceback" not in done.err
    assert str(broken) in done.err
    assert done.json["error"]["code"] == "config"


FAIL_START = [{"kind": "fail_start", "value": 3, "worker": "judge/replica-0#0"}]
HANG_START = [{"kind": "hang_start", "worker": "judge/replica-0#0"}]


def test_an_engine_that_ends_at_its_start_fails_the_launch_with_its_last_words(new: NewRun) -> None:
    run = new(small(engine={"sim": {"faults": FAIL_START}}))
    done = run.launch("--json")
    assert done.rc == 6, done.said + run.logs()
    message = done.json["error"]["message"]
    assert "judge/replica-0" in message
    assert "exit code 3" in message
    (log,) = [path for path in run.run_dir.logs.glob("*.log") if "judge" in path.name]
    last = log.read_text().splitlines()[-1]
    assert last.split("] ")[-1][:60] in message, (last, message)
    assert "Traceback" not in done.err
    run.nothing_left()
    assert run.outcome()["exit_code"] == 6


@pytest.mark.parametrize("site", [LOCAL, SLURM], indirect=True)
def test_an_engine_that_never_gets_healthy_fails_the_launch_in_time(new: NewRun) -> None:
    run = new(small(engine={"startup_seconds": 2, "sim": {"faults": HANG_START}}))
    done = run.launch("--json")
    assert done.rc == 6, done.said + run.logs()
    message = done.json["error"]["message"]
    assert "judge/replica-0" in message
    assert "2 s" in message, message
    run.nothing_left()


@pytest.mark.parametrize("site", [FAKE], indirect=True)
def test_the_script_that_is_shown_is_the_one_that_is_submitted(new: NewRun, site: Site) -> None:
    run = new(small())
    shown = command_line(site, "plan", str(run.config), "--json").json["script"]
    dry = run.launch("--dry-run", "--json")
    assert dry.rc == 0, dry.said
    assert dry.json["script"] == shown == (run.run_dir.path / "job.sbatch").read_text()
    assert "stop" not in run.launch("--dry-run").out
    shown = command_line(site, "plan", str(run.config), "--json").json["script"]
    assert f"/{run.name}/attempt_3" in shown
    document = run.up()
    assert document["attempt"] == 3
    assert (run.run_dir.path / "job.sbatch").read_text() == shown
    assert str(run.run_dir.path) in shown


@pytest.mark.parametrize("site", [FAKE], indirect=True)
def test_a_dry_run_or_a_refused_launch_hides_no_living_run(new: NewRun, site: Site) -> None:
    run = new(small())
    run.up()
    refused = new(small(pools={"actor": {"gpus_per_node": 9}}, training={"gpus": 18}))
    assert refused.launch("--json").rc == 4
    assert new(small()).launch("--dry-run").rc == 0
    state = command_line(site, "status", "--json").json
    assert (state["run"], state["state"]) == (run.name, "READY")
    assert state["gateway_url"] == run.gateway_url
    looked = command_line(site, "status", refused.name, "--json").json
    assert looked["state"] == "UNSUBMITTED"
    assert "sbatch refused the job" in looked["reason"]
    done = command_line(site, "stop")
    assert done.rc == 0, done.said
    assert f"no run was named: stopping {run.name} (attempt 1)" in done.err
    run.nothing_left()


@pytest.mark.parametrize("site", [FAKE, LOCAL], indirect=True)
def test_what_a_run_writes_is_private(new: NewRun) -> None:
    run = new(small())
    run.up()
    files = [path for path in run.run_dir.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in files} >= {"head_supervisor.log", "head_coordinator.log", "head_gateway.log"}
    assert any(path.name.endswith("_sidecar.log") for path in files)
    ours = [path for path in files if path.suffix in {".log", ".json", ".jsonl"} or path.parent.name == "keys"]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in ours if path.stat().st_mode & 0o077} == {}


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_a_launch_that_is_told_to_end_says_what_it_left(new: NewRun, site: Site) -> None:
    run = new(small(engine={"sim": {"startup_seconds": 15}}))
    argv = [sys.executable, "-m", "relax_slurm", "launch", str(run.config), "--backend", "local"]
    env = {**site.env, "RELAX_RUNS_ROOT": str(site.root)}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "submitted, files in" in first
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, said
    assert "interrupted (SIGTERM); the run goes on (job " in said
    assert f"`relax-slurm stop {run.name}` ends it" in said
    assert "Traceback" not in said
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_a_run_that_failed_is_waited_for_with_its_own_code(new: NewRun, site: Site) -> None:
    run = new(small(local={"absent": ["actor-1"]}, control={"bind_seconds": 6}))
    assert run.launch("--detach").rc == 0
    done = run.call("status", "--wait", "READY", "--timeout", "60", seconds=90)
    assert done.rc == 5, done.said
    assert "binding refused" in done.err
    assert "actor-1: look at logs/NODE_sidecar.log" in done.err


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_a_disk_that_is_full_is_said_as_that(new: NewRun, site: Site, tmp_path: Path) -> None:
    small_disk = tmp_path / "disk"
    small_disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small_disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        run = new(small())
        argv = ["launch", str(run.config), "--backend", "local"]
        done = command_line(site, *argv, RELAX_RUNS_ROOT=str(small_disk))
        assert done.rc in {2, 6}, done.said
        assert "No space left on device" in done.err
        assert "free space there" in done.err
        assert "Traceback" not in done.err
        command_line(site, "stop", run.name, "--timeout", "10", RELAX_RUNS_ROOT=str(small_disk))
    finally:
        subprocess.run(["umount", "--lazy", str(small_disk)], check=True)
