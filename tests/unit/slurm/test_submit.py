from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import SubmissionRefused
from relax_slurm.slurm import explain
from relax_slurm.slurm.backend import CancelFailed, SlurmBackend
from relax_slurm.slurm.command import Done
from relax_slurm.slurm.executor import HetSlurmExecutor, HetSlurmJob, SqueueWatcher
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.slurm.submit import Submission, answer_lost, parse_sbatch, search, submit_script


class Fakes:
    """Slurm commands made of bash, in a folder whose name has a space and a quote."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "fake bin's"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.env = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "HOME": str(folder),
        }

    def make(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def called(self, name: str) -> int:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return sum(line.startswith(f"{name} ") for line in lines)


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    folder = tmp_path / "run dir's"
    folder.mkdir()
    return Submission("demo", 1, "mark-1", folder, "#!/bin/bash\necho 'hi'\n", ("echo", "hi"))


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("12345", JobRef("12345")),
        ("12345;alpha", JobRef("12345", "alpha")),
        ("Submitted batch job 12345", JobRef("12345")),
        ("Submitted batch job 12345 on cluster c-1", JobRef("12345", "c-1")),
        ("*** 7 days to maintenance ***\nquota: 1200\n12345;alpha\n", JobRef("12345", "alpha")),
        ("Notice 2026\n\nSubmitted batch job 12345\n\n", JobRef("12345")),
        ("sbatch: your balance is 500\n12345\nHave a nice day\n", JobRef("12345")),
        ("1\n2\n3", JobRef("3")),
        ("", None),
        ("nothing here 12345 x", None),
        ("0", None),
        ("١٢٣", None),
    ],
)
def test_sbatch_output(text: str, job: JobRef | None) -> None:
    assert parse_sbatch(text) == job


@given(st.text(max_size=80))
def test_any_output_is_read(text: str) -> None:
    job = parse_sbatch(text)
    assert job is None or job.job_id.isdigit()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "gpus_per_node"),
        ("srun: error: Step requested GRES (gpu:(null)) not found in the job", "slurm.extra_srun"),
        ("sbatch: error: Invalid generic resource (gres) specification", "slurm.gpu_request"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "slurm.qos"),
        ("sbatch: fatal: --gpus-per-node and --gres are mutually exclusive", "exclude each other"),
        ("sbatch: error: Heterogeneous jobs are disabled here", "het_jobs"),
        ("cannot run sbatch: No such file or directory", "--backend local"),
    ],
)
def test_known_complaints_are_explained(words: str, advice: str) -> None:
    assert advice in (explain.refusal(words) or "")
    assert explain.refusal("something new") is None


def test_a_job_is_submitted_once_with_a_clean_environment(fakes: Fakes, submission: Submission) -> None:
    fakes.make("sbatch", 'env | grep -c SLURM_MEM; cat "$2"; echo "42;alpha"')
    environ = fakes.env | {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "1"}
    backend = SlurmBackend(environ=environ)
    assert backend.submit(submission) == JobRef("42", "alpha")
    assert fakes.called("sbatch") == 1
    assert (submission.run_dir / "job.sbatch").read_text() == submission.script
    assert (submission.run_dir / "42_submission.sh").resolve().name == "job.sbatch"


def test_a_refusal_carries_sbatchs_words_and_is_not_repeated(fakes: Fakes, submission: Submission) -> None:
    fakes.make("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid qos specification" >&2; exit 1')
    with pytest.raises(SubmissionRefused, match=r"Invalid qos specification.*slurm\.qos") as caught:
        SlurmBackend(environ=fakes.env).submit(submission)
    assert caught.value.exit_code == 4
    assert fakes.called("sbatch") == 1


def test_no_slurm_at_all(tmp_path: Path, submission: Submission) -> None:
    with pytest.raises(SubmissionRefused, match="backend local"):
        SlurmBackend(environ={"PATH": str(tmp_path)}).submit(submission)


LOST = [
    'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1',
    "exec sleep 60",
    "echo thank you",
]


@pytest.mark.parametrize("body", LOST, ids=["socket", "hangs", "silent"])
def test_a_lost_answer_is_searched_by_the_mark(fakes: Fakes, tmp_path: Path, body: str) -> None:
    fakes.make("sbatch", body)
    fakes.make(
        "squeue",
        """
        [ -e "$CALLS.seen" ] || { touch "$CALLS.seen"; echo '70|RUNNING|None|other'; exit 0; }
        echo '71+0|PENDING|Priority|team a,mark-1'
        echo '71+1|PENDING|Priority|team a,mark-1'
        echo '60+0|CANCELLED|None|mark-1'
        echo '99|FAILED|BadConstraints|mark-1'
        echo '80|RUNNING|None|mark-10'
        echo '81|RUNNING|None|xmark-1'
        """,
    )
    script = tmp_path / "s.sh"
    script.write_text("#!/bin/bash\n")
    pauses: list[float] = []
    job = submit_script(script, "mark-1", environ=fakes.env, seconds=2, pause=pauses.append)
    assert job == JobRef("71")
    assert fakes.called("sbatch") == 1, "never a second submission"
    assert fakes.called("squeue") == 2
    assert len(pauses) == 1


@pytest.mark.parametrize(("squeue", "word"), [("true", "answered without it"), ("echo broken >&2; exit 1", "broken")])
def test_a_lost_answer_without_a_trace_says_what_to_look_for(
    fakes: Fakes, tmp_path: Path, squeue: str, word: str
) -> None:
    fakes.make("sbatch", LOST[0])
    fakes.make("squeue", squeue)
    script = tmp_path / "s.sh"
    script.write_text("#!/bin/bash\n")
    with pytest.raises(SubmissionRefused, match=word) as caught:
        submit_script(script, "mark-1", environ=fakes.env, pause=lambda _: None)
    assert "mark-1" in caught.value.message
    assert fakes.called("sbatch") == 1


def test_which_answers_are_lost() -> None:
    assert answer_lost(Done(("sbatch",), None, "", "", timed_out=True))
    assert answer_lost(Done(("sbatch",), 1, "", "Unable to contact slurm controller (connect failure)"))
    assert not answer_lost(Done(("sbatch",), 1, "", "Invalid account"))
    assert not answer_lost(Done(("sbatch",), None, "", "cannot run sbatch"))


def test_search_with_a_failing_squeue_finds_nothing(fakes: Fakes) -> None:
    fakes.make("squeue", "echo '5|RUNNING|None|mark-1'; exit 1")
    found, done = search("mark-1", env=fakes.env)
    assert found is None
    assert done.rc == 1


def test_polling_survives_a_controller_that_is_away(fakes: Fakes) -> None:
    backend = SlurmBackend(environ=fakes.env)
    job = JobRef("12")
    fakes.make("squeue", "echo '12+0|RUNNING|n1|None'; echo '12+1|RUNNING|n2|None'")
    assert backend.poll(job).state is JobState.RUNNING
    fakes.make("squeue", "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1")
    away = backend.poll(job)
    assert (away.state, away.last) == (JobState.UNKNOWN, JobState.RUNNING)
    assert len(away.components) == 2
    fakes.make("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert backend.poll(job).state is JobState.GONE


def test_cancel(fakes: Fakes) -> None:
    backend = SlurmBackend(environ=fakes.env)
    fakes.make("scancel", "true")
    backend.cancel(JobRef("12", "alpha"))
    assert "scancel --clusters=alpha 12" in fakes.calls.read_text()
    fakes.make("scancel", "echo 'scancel: error: Kill job error on job id 12: Invalid job id specified' >&2; exit 1")
    backend.cancel(JobRef("12"))
    fakes.make("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    with pytest.raises(CancelFailed, match="permission denied") as refused:
        backend.cancel(JobRef("12"))
    assert not refused.value.silent
    fakes.make("scancel", "exec sleep 60")
    with pytest.raises(CancelFailed, match=r"did not answer within 0\.2 s") as silent:
        backend.cancel(JobRef("12"), 0.2)
    assert silent.value.silent
    fakes.make("squeue", "exec sleep 60")
    assert backend.poll(JobRef("12"), 0.2).state is JobState.UNKNOWN


def test_the_submitit_watcher_needs_no_accounting(fakes: Fakes) -> None:
    watcher = SqueueWatcher()
    watcher.env = fakes.env
    fakes.make("squeue", "echo '12+0|RUNNING|n1|None'; echo '12+1|RUNNING|n[2-3]|None'")
    assert watcher.get_state("12", mode="force") == "RUNNING"
    assert watcher.get_info("12", mode="cache")["NodeList"] == "n1,n[2-3]"
    fakes.make("squeue", "exit 1")
    watcher.update()
    assert watcher.get_state("12", mode="cache") == "RUNNING", "a failing squeue changes nothing"
    assert watcher.view("12", mode="cache").state is JobState.UNKNOWN
    assert not watcher.is_done("12", mode="cache")
    fakes.make("squeue", "echo '12+0|COMPLETED|n1|None'; echo '12+1|FAILED|n2|None'")
    watcher.update()
    assert watcher.is_done("12", mode="cache")
    assert watcher.get_state("12", mode="cache") == "FAILED"
    calls = fakes.called("squeue")
    watcher.update()
    assert fakes.called("squeue") == calls, "an ended job is not asked about again"
    watcher.clear()
    assert watcher.view("12", mode="cache").state is JobState.UNKNOWN


def test_the_executor_gives_a_submitit_job(fakes: Fakes, submission: Submission) -> None:
    fakes.make("sbatch", "echo 42")
    job = HetSlurmExecutor(submission, environ=fakes.env).submit_job()
    assert isinstance(job, HetSlurmJob)
    assert job.job_id == "42"
    assert job.paths.submission_file.read_text() == submission.script
    assert isinstance(job.watcher, SqueueWatcher)
