# ruff: noqa: T201 - a tour is what it prints
"""What `make quickstart` shows: launch, ask every role over HTTP, look with `top`, stop, prove that nothing is left.

    .venv/bin/python tools/quickstart.py            the tour
    .venv/bin/python tools/quickstart.py --real DIR the tour with SGLang itself, in what tools/real/build.sh made
    .venv/bin/python tools/quickstart.py --stop     end what an interrupted tour may have left

Everything of it lives in `.quickstart/` of the checkout. Whatever goes wrong, what was started is stopped. Processes
are known by the run's own folder, which is in their command line or in the tag that they carry in their environment,
never by name.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = ROOT / "configs" / "quickstart.yaml"
REAL = ROOT / "tools" / "real" / "smollm2.yaml"
HOME = ROOT / ".quickstart"
RUNS = HOME / "runs"
GONE_SECONDS = 5.0
ANSWER_SECONDS = 30.0
# Set up for other programs or other runs; none of it may reach into the tour.
NOT_INHERITED = ("RELAX_", "SLURM_", "SBATCH_", "PYTHON")


class TourFailed(Exception):
    """Something was not as it should be; the message is one sentence."""


def environment() -> dict[str, str]:
    """The environment of every command of the tour."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return {**kept, "RELAX_RUNS_ROOT": str(RUNS), "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}


def relax(*words: str, show: bool = True) -> str:
    """One `relax-slurm` command; its stdout. Messages go to our stderr. TourFailed when it does not end with 0."""
    if show:
        print(f"\n$ relax-slurm {' '.join(word.replace(f'{ROOT}/', '') for word in words)}", flush=True)
    command = [sys.executable, "-m", "relax_slurm", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise TourFailed(f"relax-slurm {words[0]} ended with code {done.returncode}, wanted 0; its own words are above")
    return done.stdout


class Gateway:
    """The HTTP side of the run. No proxy: the gateway is on this machine."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer of one POST."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            raise TourFailed(f"POST {path} was answered {error.code}, wanted 200: {text}") from None
        except (OSError, ValueError) as error:
            raise TourFailed(f"POST {path} got no JSON answer from {self._url}: {error}") from None


def say(who: str, text: str) -> None:
    """One line of the conversation."""
    print(f"  {who:8} {text}")


def converse(gateway: Gateway) -> None:
    """A question to the policy on both routes, its answers to the judge, the better one to the teacher."""
    print("\nPOST /rollout/generate")
    question = "What is 17 + 25?"
    say("you", question)
    first = gateway.post("/rollout/generate", {"text": question, "sampling_params": {"max_new_tokens": 16}})["text"]
    say("rollout", f"{first}   (the simulated policy is wrong now and then, so that a judge has work)")

    print("\nPOST /rollout/v1/chat/completions")
    question_2 = "What is 6 * 7?"
    say("you", question_2)
    chat = {"model": "policy", "messages": [{"role": "user", "content": question_2}]}
    second = gateway.post("/rollout/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    say("rollout", second)

    print("\nPOST /genrm/generate with messages")
    for asked, answer, reference in ((question, first, "42"), (question_2, second, "42")):
        task = f"Question: {asked}\nReference: {reference}\nAnswer: {answer}\nIs the answer right? Say 1 or 0."
        say("you", task.replace("\n", " | "))
        verdict = gateway.post("/genrm/generate", {"messages": [{"role": "user", "content": task}]})["response"]
        say("genrm", verdict)
        if verdict != str(int(answer == reference)):
            raise TourFailed(f"the judge said {verdict!r} to the answer {answer!r}, wanted {int(answer == reference)}")

    print("\nPOST /teacher/generate with return_logprob")
    text = f"{question_2} {second}"
    say("you", f"how likely is {text!r}?")
    body = {"text": text, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    tokens = gateway.post("/teacher/generate", body)["meta_info"]["input_token_logprobs"]
    known = [entry[0] for entry in tokens if entry[0] is not None]
    if len(known) < 2 or not all(value <= 0 for value in known):
        raise TourFailed(f"the teacher gave {len(known)} log-probs for {len(tokens)} tokens, wanted all but the first")
    shown = ", ".join(f"{value:.2f}" for value in known[:6])
    say("teacher", f"{len(known)} log-probs, sum {sum(known):.2f}: {shown}, …")


# --- what is left ---------------------------------------------------------------------------------------------


def processes_of(attempt: Path) -> list[int]:
    """Pids of the attempt that still run: all that carry its tag, and the supervisor, which was told its folder."""
    tag = f"RELAX_RUN_TAG={attempt.parent.name}/{attempt.name.rpartition('_')[2]}@{attempt}".encode()
    folder = str(attempt).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended while we looked, or it is another user's
                words = (entry / "cmdline").read_bytes().split(b"\0")
                told = any(pair == (b"--run-dir", folder) for pair in itertools.pairwise(words))
                if told or tag in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


def attempts() -> list[Path]:
    """Every attempt of the tour's run, oldest first."""
    return sorted(RUNS.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def still_there() -> list[int]:
    """Pids of all attempts that do not end within GONE_SECONDS."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := [pid for attempt in attempts() for pid in processes_of(attempt)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """One signal to each; one that has gone meanwhile is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_leftovers() -> None:
    """End what an interrupted tour left: asked through `stop`, then by TERM, then by KILL. TourFailed if it stays."""
    for attempt in attempts():
        if processes_of(attempt):
            print(f"ending what is left of {attempt}", file=sys.stderr)
            with contextlib.suppress(TourFailed):
                relax("stop", str(attempt), show=False)
            signal_all(processes_of(attempt), signal.SIGTERM)
    for _ in range(2):
        left = still_there()
        if not left:
            return
        signal_all(left, signal.SIGKILL)
    raise TourFailed(f"processes {', '.join(map(str, left))} do not end even by KILL; look at them with ps")


def prove_nothing_left() -> None:
    """TourFailed when anything of the run outlives its stop; it is ended then."""
    left = still_there()
    if left:
        signal_all(left, signal.SIGKILL)
        pids = ", ".join(map(str, left))
        raise TourFailed(f"{len(left)} processes of the run were still there {GONE_SECONDS:g} s after stop: {pids}")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One tour per checkout at a time."""
    HOME.mkdir(mode=0o700, exist_ok=True)
    with (HOME / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TourFailed(f"another tour runs in this checkout (it holds {HOME / 'lock'}); wait for it") from None
        yield


def interrupt(number: int, _frame: object) -> NoReturn:
    """A signal ends the tour through its `finally`."""
    raise SystemExit(128 + number)


def converse_for_real(gateway: Gateway) -> None:
    """The same routes with a small real model: it says what it says, so only the shape of the answers is checked."""
    question = "What is the capital of France?"
    print("\nPOST /rollout/v1/chat/completions")
    say("you", question)
    chat = {"model": "policy", "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    said = gateway.post("/rollout/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    say("rollout", said)

    print("\nPOST /genrm/generate with messages")
    task = f"Question: {question}\nAnswer: {said}\nIs the answer right? Say yes or no."
    say("you", task.replace("\n", " | "))
    judge = {
        "messages": [{"role": "user", "content": task}],
        "sampling_params": {"max_new_tokens": 24, "temperature": 0},
    }
    verdict = gateway.post("/genrm/generate", judge)["response"]
    say("genrm", verdict)

    print("\nPOST /teacher/generate with return_logprob")
    say("you", f"how likely is {said!r}?")
    body = {"text": said, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    tokens = gateway.post("/teacher/generate", body)["meta_info"]["input_token_logprobs"]
    known = [entry[0] for entry in tokens if entry[0] is not None]
    say(
        "teacher",
        f"{len(known)} log-probs, sum {sum(known):.2f}: {', '.join(f'{value:.2f}' for value in known[:6])}, …",
    )
    if not (said and verdict and known and all(value <= 0 for value in known)):
        raise TourFailed("a role gave an empty answer or positive log-probs; see `relax-slurm logs`")


def real_overrides(home: Path) -> list[str]:
    """What tools/real/smollm2.yaml leaves to the machine."""
    model = str(home / "models" / "smollm2-135m")
    values = {
        "engine.python": str(home / "venv" / "bin" / "python"),
        "engine.env.PYTHONPATH": str(home / "shim"),
        "roles.rollout.models.policy.model_path": model,
        "roles.genrm.models.judge.model_path": model,
        "roles.teacher.models.math.model_path": model,
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def tour(real: Path | None) -> None:
    """The whole tour; what it started is stopped in any case."""
    began = time.monotonic()
    end_leftovers()
    if real is None:
        config, overrides, ask = str(SIMULATED), [], converse
        print("relax-slurm: three inference roles on two virtual nodes of this machine, with simulated engines.")
    else:
        config, overrides, ask = str(REAL), real_overrides(real), converse_for_real
        print("relax-slurm: three roles on this machine's CPU, each one SGLang engine with SmolLM2-135M-Instruct.")
        print("What stands in for a GPU, and what is unproven: docs/real-engine.md. A start takes a minute or two.")
    picture = json.loads(relax("plan", config, *overrides, "--json"))["picture"]
    print(f"{picture.rstrip()}\n  (of all that `plan` shows; without --json it is text)")
    stopped = False
    try:
        state = json.loads(relax("launch", config, "--backend", "local", *overrides, "--json"))
        print(f"gateway {state['gateway_url']}, token in {state['token_file']}")
        ask(Gateway(state["gateway_url"], Path(state["token_file"]).read_text().strip()))
        print(relax("top", "--once").rstrip())
        print(relax("stop").rstrip())
        stopped = True
    finally:
        if not stopped:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            print("the tour did not get to its end; what it started is stopped now", file=sys.stderr)
            end_leftovers()
    prove_nothing_left()
    print(f"\nno process of the run is left. All of it took {time.monotonic() - began:.1f} s.")
    print("Next: README.md, and `.venv/bin/relax-slurm launch configs/decoupled.yaml` where there is a Slurm.")


def main() -> int:
    """Exit 0 when everything was as it should be."""
    parser = argparse.ArgumentParser(description="the tour of make quickstart")
    parser.add_argument("--stop", action="store_true", help="end what an interrupted tour left, and nothing else")
    parser.add_argument("--real", type=Path, metavar="DIR", help="what tools/real/build.sh made: run SGLang itself")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        with alone():
            if arguments.stop:
                end_leftovers()
            else:
                tour(arguments.real)
    except TourFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
