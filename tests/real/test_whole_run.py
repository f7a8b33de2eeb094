"""A run with SGLang behind every role, as a user has it: run file, command line, gateway, three engines, stop."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.contract.engine_program import real_sglang
from tests.harness.launch import new_run
from tests.harness.sites import LocalSite, fresh_name
from tests.real.asking import OPENINGS, QUESTION, SCORE, Straight, generation, post, scored, smollm2

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "tools" / "real" / "smollm2.yaml"


@pytest.mark.timeout(1200)
def test_three_roles_answer_with_real_text(tmp_path: Path, chat_model: Path, straight: Straight) -> None:
    body = yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))
    with new_run(LocalSite(tmp_path / "runs"), body, tmp_path, fresh_name()) as run:
        done = run.launch("--json", *smollm2(chat_model), seconds=500)
        assert done.rc == 0, done.said + run.logs()
        print(done.err)
        client = run.http(seconds=120)
        chat = post(client, "/rollout/v1/chat/completions", {"model": "policy", "messages": QUESTION, "temperature": 0})
        assert "Paris" in chat["choices"][0]["message"]["content"]
        for text, capital in OPENINGS.items():
            plain = post(client, "/rollout/generate", generation(text))
            assert capital in plain["text"]
            assert plain["text"] == straight.texts[text]
        verdict = post(client, "/genrm/generate", {"messages": QUESTION, "sampling_params": {"temperature": 0}})
        assert set(verdict) == {"response"}
        assert "Paris" in verdict["response"]
        assert scored(post(client, "/teacher/generate", SCORE)) == straight.scores, "nothing is lost or changed"
        stopped = run.call("stop", "--json", seconds=90)
        assert stopped.rc == 0, stopped.said + run.logs()
        assert stopped.json["unproven"] == []
        run.nothing_left()


def test_the_run_file_is_for_the_environment_that_is_built() -> None:
    """The arguments in the run file and those of the tests say the same."""
    body = yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))
    arguments = body["roles"]["rollout"]["models"]["policy"]["engine_args"]
    known = json.loads(os.environ["RELAX_TEST_SGLANG_ARGS"])
    assert {**known, "max_total_tokens": arguments["max_total_tokens"]} == arguments
    assert body["engine"]["env"].items() <= real_sglang()["env"].items()
