"""The program behind the fake Slurm commands: `python fake_slurm_program.py COMMAND STATE_FOLDER ARGUMENT…`.

It understands the options that relax-slurm uses, answers in Slurm's own formats and runs everything on this
machine. A job is a JSON file, a step another one. Standard library only, so that a command starts quickly.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

GPUS_PER_NODE = 8
NODES = tuple(f"fake{number}" for number in range(1, 7))
KILL_WAIT_SECONDS = 5.0
NO_JOB = "slurm_load_jobs error: Invalid job id specified"


class State:
    """The folder that stands for the controller."""

    def __init__(self, folder):
        self.folder = Path(folder)

    @contextlib.contextmanager
    def locked(self):
        """One command at a time changes something."""
        with (self.folder / "lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def read(self, name):
        """One file, None when it is not there."""
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def write(self, name, value):
        """Replace one file as a whole."""
        fresh = self.folder / f".{name}.{os.getpid()}"
        fresh.write_text(json.dumps(value))
        fresh.replace(self.folder / name)

    def jobs(self):
        """Every job there ever was, oldest first."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("job-*.json")]
        return sorted(found, key=lambda job: job["ids"][0])

    def job_of(self, number):
        """The job that has this component id."""
        return next((job for job in self.jobs() if number in job["ids"]), None)

    def steps(self):
        """Steps that run."""
        found = []
        for path in self.folder.glob("step-*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(path.read_text()))
        return found


def option(words, name, default=None):
    """Value of `--name=value`."""
    return next((word.split("=", 1)[1] for word in words if word.startswith(f"{name}=")), default)


def components(script):
    """One dictionary of options per block of `#SBATCH` lines."""
    blocks = [{}]
    for line in script.splitlines():
        if line == "#SBATCH hetjob":
            blocks.append({})
        elif line.startswith("#SBATCH "):
            for word in shlex.split(line.removeprefix("#SBATCH ")):
                name, _, value = word.partition("=")
                blocks[-1][name] = value
    return blocks


def gpus_of(block):
    """GPUs per node that a block asks for."""
    asked = block.get("--gpus-per-node") or block.get("--gres", "0")
    return int(asked.rpartition(":")[2])


def sbatch(state, words):
    """Place the job at once on free nodes and start its batch script."""
    path = Path(words[-1])
    blocks = components(path.read_text())
    with state.locked():
        taken = {name for job in state.jobs() if job["state"] == "RUNNING" for group in job["nodes"] for name in group}
        free = [name for name in NODES if name not in taken]
        sizes = [int(block["--nodes"]) for block in blocks]
        if any(gpus_of(block) > GPUS_PER_NODE for block in blocks) or sum(sizes) > len(free):
            print(
                "sbatch: error: Batch job submission failed: Requested node configuration is not available",
                file=sys.stderr,
            )
            return 1
        first = 1 + max((job["ids"][-1] for job in state.jobs()), default=0)
        groups = [[free.pop(0) for _ in range(size)] for size in sizes]
        job = {
            "ids": list(range(first, first + len(blocks))),
            "nodes": groups,
            "gpus": [gpus_of(block) for block in blocks],
            "comment": blocks[0].get("--comment", ""),
            "name": blocks[0].get("--job-name", "fake"),
            "output": blocks[0]["--output"].replace("%%", "%"),
            "chdir": blocks[0].get("--chdir", os.getcwd()),
            "script": str(path),
            "state": "RUNNING",
            "reason": "None",
        }
        state.write(f"job-{first}.json", job)
    runner = [sys.executable, __file__, "batch", str(state.folder), str(first)]
    subprocess.Popen(
        runner,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(first)
    return 0


def batch_environment(job):
    """What a batch step sees."""
    env = dict(os.environ)
    first = job["nodes"][0]
    env |= {
        "SLURM_JOB_ID": str(job["ids"][0]),
        "SLURM_JOB_NODELIST": ",".join(first),
        "SLURM_NODELIST": ",".join(first),
        "SLURMD_NODENAME": first[0],
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
    }
    if job["gpus"][0]:
        env["SLURM_JOB_GPUS"] = env["CUDA_VISIBLE_DEVICES"] = indexes(job["gpus"][0])
    if len(job["ids"]) > 1:
        env["SLURM_HET_SIZE"] = str(len(job["ids"]))
        for group, (number, nodes) in enumerate(zip(job["ids"], job["nodes"], strict=True)):
            env[f"SLURM_JOB_ID_HET_GROUP_{group}"] = str(number)
            env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] = ",".join(nodes)
    return env


def indexes(count):
    """A component always gets the first GPUs of its nodes."""
    return ",".join(str(number) for number in range(count))


def batch(state, words):
    """The life of a job: its script, then the end of whatever steps are left."""
    name = f"job-{words[0]}.json"
    job = state.read(name)
    with open(job["output"], "ab") as log:
        child = subprocess.Popen(
            ["bash", job["script"]],
            env=batch_environment(job),
            cwd=job["chdir"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with state.locked():
        state.write(name, state.read(name) | {"pid": child.pid})
    code = child.wait()
    for step in state.steps():
        if step["job"] in job["ids"]:
            kill(step["pid"], signal.SIGKILL)
    with state.locked():
        latest = state.read(name)
        if latest["state"] == "RUNNING":
            latest["state"] = "COMPLETED" if code == 0 else "FAILED"
        latest.pop("pid", None)
        state.write(name, latest)
    return 0


def srun(state, words):
    """Run the command once, as the one task of a step on the named node."""
    at = next(index for index, word in enumerate(words) if not word.startswith("-"))
    options, command = words[:at], words[at:]
    with open(state.folder / "srun.log", "a", encoding="utf-8") as log:
        log.write(shlex.join(words) + "\n")
    job = state.job_of(int(os.environ["SLURM_JOB_ID"]))
    group = int(option(options, "--het-group", "0"))
    node = option(options, "--nodelist")
    if node not in job["nodes"][group] or job["state"] != "RUNNING":
        print(f"srun: error: node {node} is not in component {group} of job {job['ids'][0]}", file=sys.stderr)
        return 1
    with state.locked():
        used = [step["number"] for step in state.steps() if step["job"] == job["ids"][group]]
        number = 1 + max(used, default=-1)
        step = {
            "job": job["ids"][group],
            "number": number,
            "node": node,
            "name": option(options, "--job-name", "x"),
        }
        own = f"step-{step['job']}-{number}.json"
        state.write(own, step | {"pid": 0})
    env = dict(os.environ) | {"SLURMD_NODENAME": node, "SLURM_STEP_ID": str(number), "SLURM_NTASKS": "1"}
    if job["gpus"][group]:
        env |= {"SLURM_STEP_GPUS": indexes(job["gpus"][group]), "SLURM_GPUS_ON_NODE": str(job["gpus"][group])}
        env["CUDA_VISIBLE_DEVICES"] = env["SLURM_STEP_GPUS"]
    env |= (state.read("lies.json") or {}).get(node, {})
    output = option(options, "--output", "/dev/null").replace("%%", "%")
    with open(output, "ab") as log:
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    state.write(own, step | {"pid": child.pid})

    def forced(number, frame):
        kill(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, forced)
    signal.signal(signal.SIGINT, lambda number, frame: kill(child.pid, signal.SIGINT))
    try:
        code = child.wait()
    finally:
        (state.folder / own).unlink()
    return code if code >= 0 else 128 - code


def kill(pid, number):
    """Signal one process, if there is one."""
    if pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def squeue(state, words):
    """Jobs, or with --steps the steps."""
    wanted = option(words, "--jobs")
    ids = None if wanted is None else {int(word) for word in wanted.split(",")}
    pattern = option(words, "--format", "%i|%T|%N|%r")
    if "--steps" in words:
        for step in state.steps():
            if ids is None or step["job"] in ids:
                show(pattern, i=f"{step['job']}.{step['number']}", j=step["name"], N=step["node"])
        return 0
    jobs = state.jobs()
    if ids is not None:
        jobs = [job for job in jobs if ids & set(job["ids"])]
        if not jobs:
            print(NO_JOB, file=sys.stderr)
            return 1
    for job in jobs:
        if "--states=all" not in words and job["state"] != "RUNNING":
            continue
        for offset, nodes in enumerate(job["nodes"]):
            number = f"{job['ids'][0]}+{offset}" if len(job["ids"]) > 1 else job["ids"][0]
            show(
                pattern,
                i=number,
                T=job["state"],
                N=",".join(nodes),
                r=job["reason"],
                j=job["name"],
                k=job["comment"],
            )
    return 0


def show(pattern, **fields):
    """One line in the format that was asked for."""
    print(re.sub(r"%(\w)", lambda mark: str(fields.get(mark[1], "")), pattern))


def scontrol(state, words):
    """`show job`, `show config`, `show node`."""
    kind, rest = words[1], words[2:]
    if kind == "config":
        print("Configuration data as of now\nProctrackType           = proctrack/linuxproc")
        return 0
    if kind == "node":
        print(f"NodeName={rest[0]} NodeAddr=127.0.0.1 NodeHostName=fake\n   State=MIXED")
        return 0
    job = state.job_of(int(rest[-1]))
    if job is None:
        print(NO_JOB, file=sys.stderr)
        return 1
    for offset, (number, nodes, gpus) in enumerate(zip(job["ids"], job["nodes"], job["gpus"], strict=True)):
        print(f"JobId={number} JobName={job['name']}")
        if len(job["ids"]) > 1:
            print(f"   HetJobId={job['ids'][0]} HetJobOffset={offset}")
        print(f"   JobState={job['state']} Reason=None\n   NodeList={','.join(nodes)}")
        if gpus and job["state"] == "RUNNING":
            for node in nodes:
                print(f"     Nodes={node} CPU_IDs=0 Mem=100 GRES=gpu:{gpus}(IDX:0-{gpus - 1})")
        print(f"   Comment={job['comment']}\n")
    return 0


def scancel(state, words):
    """Signal a step, or end a job: TERM to the batch step and to every step, KILL after a while."""
    targets = [word for word in words if not word.startswith("-")]
    number = getattr(signal, f"SIG{option(words, '--signal', 'TERM')}")
    for target in targets:
        job_id, dot, step_id = target.partition(".")
        if dot:
            for step in state.steps():
                if (step["job"], str(step["number"])) == (int(job_id), step_id):
                    kill(step["pid"], number)
            continue
        job = state.job_of(int(job_id))
        if job is None:
            print("scancel: error: Kill job error: Invalid job id specified", file=sys.stderr)
            return 1
        end_job(state, job)
    return 0


def end_job(state, job):
    """What scancel without a signal does."""
    name = f"job-{job['ids'][0]}.json"
    with state.locked():
        job = state.read(name)
        if job["state"] != "RUNNING":
            return
        state.write(name, job | {"state": "CANCELLED"})
    pids = [job.get("pid", 0), *(step["pid"] for step in state.steps() if step["job"] in job["ids"])]
    for pid in pids:
        kill(pid, signal.SIGTERM)
    subprocess.Popen(
        [sys.executable, __file__, "killwait", str(state.folder), str(job["ids"][0])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def killwait(state, words):
    """KILL for a cancelled job whose batch step has not ended in time."""
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while "pid" in state.read(f"job-{words[0]}.json"):
        if time.monotonic() > deadline:
            job = state.read(f"job-{words[0]}.json")
            for pid in [
                job.get("pid", 0),
                *(step["pid"] for step in state.steps() if step["job"] in job["ids"]),
            ]:
                kill(pid, signal.SIGKILL)
            return 0
        time.sleep(0.05)
    return 0


COMMANDS = {
    "sbatch": sbatch,
    "srun": srun,
    "squeue": squeue,
    "scontrol": scontrol,
    "scancel": scancel,
    "batch": batch,
    "killwait": killwait,
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](State(sys.argv[2]), sys.argv[3:]))
