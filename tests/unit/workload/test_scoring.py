"""Teacher and student: what is asked, what is kept, and what is refused; against simulated engines over HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from relax_slurm.client.inference import InferenceClient, PolledDiscovery
from relax_slurm.core.plan import Role
from relax_slurm.errors import RelaxError
from relax_slurm.workload import prefill, scoring
from relax_slurm.workload.failures import ScoreInvalid, VersionUnknown
from relax_slurm.workload.prefill import Selection, Window
from relax_slurm.workload.samples import Sample
from relax_slurm.workload.scoring import StudentScoring, TeacherScoring, TeacherSettings
from relax_slurm.workload.validate import Expected, check_scored
from tests.unit.workload.engines import TOKEN, engines
from tests.unit.workload.stage import sample


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def batch() -> list[Sample]:
    made = [sample(0, index, length=index + 1) for index in range(3)]
    made += [sample(1, 3, length=0, tokens=[1, 2]), sample(1, 4, remove_sample=True)]
    for one in made:
        one.student_topk_token_ids = [[place, place + 7] for place in range(one.response_length)]
        one.reward = 0.0
    return made


@pytest.mark.parametrize("selection", Selection)
@pytest.mark.parametrize("window", [256, 2])
def test_each_selection_gives_what_it_owes(selection: Selection, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "WINDOW", window)

    async def body() -> None:
        async with engines() as stage:
            samples = batch()
            await TeacherScoring(stage.client, TeacherSettings(selection, top_k=2)).score(samples)
            student = selection.teacher_candidates
            if student:
                await StudentScoring(stage.client).score(samples)
            expected = Expected(fields=selection.fields(student), top_k=2)
            for one in samples:
                check_scored(one, expected)
            assert samples[3].teacher_log_probs == samples[4].teacher_log_probs == []
            # The same calls made by hand.
            by_hand = await stage.client.generate(
                {
                    "input_ids": samples[2].tokens,
                    "sampling_params": {"max_new_tokens": 0},
                    "return_logprob": True,
                    "logprob_start_len": 3,
                    "top_logprobs_num": 2,
                    "token_ids_logprob": [0, 7, 1, 8, 2, 9],
                },
                Role.TEACHER,
            )
            meta = by_hand["meta_info"]
            assert samples[2].teacher_log_probs == [row[0] for row in meta["input_token_logprobs"][1:]]
            if selection.teacher_candidates:
                rows = meta["input_top_logprobs"][1:]
                assert samples[2].teacher_topk_token_ids == [[one[1] for one in row] for row in rows]
            if selection.student_candidates:
                told = [{one[1]: one[0] for one in row} for row in meta["input_token_ids_logprobs"][1:]]
                wanted = [[told[place][place], told[place][place + 7]] for place in range(3)]
                assert samples[2].teacher_at_student_topk_log_probs == wanted

    run(body())


def test_the_request_is_the_protocols() -> None:
    body = prefill.request([1, 2, 3, 4, 5], 3, Window(0, 2), 0, None)
    assert body == {
        "input_ids": [1, 2, 3, 4, 5],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 2,
    }
    wide = prefill.request([1, 2, 3, 4, 5], 3, Window(0, 2), 4, [[9, 8], [8, 7]])
    assert (wide["top_logprobs_num"], wide["token_ids_logprob"]) == (4, [7, 8, 9])


def test_routes_by_data_source_and_keeps_a_group_together() -> None:
    async def body() -> None:
        async with engines() as stage:
            samples = [sample(group, group, metadata={"data_source": source}) for group, source in enumerate("abc")]
            samples.append(sample(3, 3, metadata={"data_source": 5}))
            settings = TeacherSettings(route_keys={"a": "code"}, known_keys=frozenset({"b"}))
            keys = [scoring.route_key_of(one, settings) for one in samples]
            assert keys == ["code", "b", None, None]
            await TeacherScoring(stage.client, TeacherSettings(route_keys={"a": "code"})).score(samples)
            assert stage.sims[Role.TEACHER].keys == ["code/0", "/1", "/2", "/3"]

    run(body())


def test_two_prefills_need_one_discovery() -> None:
    async def body() -> None:
        async with engines() as stage:
            discovery = PolledDiscovery(stage.gateway_url, TOKEN, max_age_seconds=60)
            async with InferenceClient(discovery) as client:
                teacher = TeacherScoring(client, TeacherSettings())
                await teacher.score([sample()])
                await teacher.score([sample()])
            assert discovery.fetches == 1

    run(body())


def test_the_teacher_may_read_another_prompt() -> None:
    async def body() -> None:
        async with engines() as stage:
            one = sample(length=3)
            one.teacher_tokens = [7, 7, *one.tokens[-3:]]
            await TeacherScoring(stage.client, TeacherSettings()).score([one])
            sent = json.loads(stage.sims[Role.TEACHER].bodies[0])
            assert sent["input_ids"] == one.teacher_tokens
            assert sent["logprob_start_len"] == 1
            assert len(one.teacher_log_probs or []) == 3

    run(body())


# --- answers that are not right --------------------------------------------------------------------------------------


class Damaged:
    """The simulated teacher, with answers changed on their way."""

    def __init__(self, client: InferenceClient, change: Callable[[dict[str, Any]], Any]) -> None:
        self.client, self.change, self.asked = client, change, 0

    async def generate(self, payload: Any, role: Role, **options: Any) -> Any:
        self.asked += 1
        answer = copy.deepcopy(await self.client.generate(payload, role, **options))
        changed = self.change(answer["meta_info"])
        return answer if changed is None else changed

    async def abort(self, rids: Any, role: Role) -> int:
        return 0


def rows(meta: dict[str, Any], name: str) -> list[Any]:
    found: list[Any] = meta[name]
    return found


DAMAGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda meta: rows(meta, "input_token_logprobs").pop(), "has 3 values, wanted 4"),
    (lambda meta: rows(meta, "input_token_logprobs").append([-1.0, 5, None]), "has 5 values"),
    (lambda meta: meta.pop("input_token_logprobs"), "wanted a list"),
    (lambda meta: rows(meta, "input_token_logprobs")[1].__setitem__(0, math.nan), "wanted a finite number"),
    (lambda meta: rows(meta, "input_token_logprobs")[2].__setitem__(0, None), "wanted a finite number"),
    (lambda meta: rows(meta, "input_token_logprobs")[2].__setitem__(1, -4), "from 0 on"),
    (lambda meta: rows(meta, "input_token_logprobs")[2].__setitem__(1, 4), "another tokenizer"),
    (lambda meta: rows(meta, "input_top_logprobs")[1].pop(), "has 1 candidates, wanted 2"),
    (lambda meta: rows(meta, "input_top_logprobs")[1][0].__setitem__(1, -1), "from 0 on"),
    (lambda meta: rows(meta, "input_top_logprobs")[1].__setitem__(0, [1]), "wanted .logprob"),
    (lambda meta: rows(meta, "input_token_ids_logprobs").__setitem__(2, None), "wanted a list of candidates"),
    (lambda meta: rows(meta, "input_token_ids_logprobs").__setitem__(2, []), "does not tell of token"),
    (lambda meta: {"text": "no meta"}, "no meta_info"),
]


@pytest.mark.parametrize(("damage", "match"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_wrong_answer_fails_the_stage(damage: Callable[[dict[str, Any]], Any], match: str) -> None:
    async def body() -> None:
        async with engines() as stage:
            # pop() and append() answer something, which must not replace the answer
            def change(meta: dict[str, Any]) -> Any:
                changed = damage(meta)
                return changed if isinstance(changed, dict) and "text" in changed else None

            teacher = TeacherScoring(Damaged(stage.client, change), TeacherSettings(Selection.UNION, top_k=2))
            one = batch()[2]
            with pytest.raises(ScoreInvalid, match=f"teacher: sample 2 of group 0: .*{match}"):
                await teacher.score([one])
            assert one.teacher_log_probs is None

    run(body())


def test_after_the_first_failure_nothing_more_is_asked() -> None:
    async def body() -> None:
        async with engines() as stage:
            damaged = Damaged(stage.client, lambda meta: {})
            with pytest.raises(ScoreInvalid):
                await TeacherScoring(damaged, TeacherSettings(concurrency=1)).score([sample() for _ in range(9)])
            assert damaged.asked == 1

    run(body())


def test_candidates_that_the_rollout_did_not_keep() -> None:
    async def body() -> None:
        async with engines() as stage:
            with pytest.raises(ScoreInvalid, match="student_topk_token_ids is missing"):
                await TeacherScoring(stage.client, TeacherSettings(Selection.STUDENT_TOPK)).score([sample()])
            with pytest.raises(ScoreInvalid, match="the teacher has to score first"):
                await StudentScoring(stage.client).score([sample()])

    run(body())


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "match"),
    [([["7"], ["8"]], "7.*8"), ([["7", "8"], ["7"]], "wanted one"), ([["7"], []], "unknown version")],
)
def test_the_student_needs_one_known_version(versions: list[list[str]], match: str) -> None:
    samples = [sample(0, index, weight_versions=told) for index, told in enumerate(versions)]
    with pytest.raises(VersionUnknown, match=match):
        scoring.one_version(samples)


def test_version_zero_is_a_version() -> None:
    assert scoring.one_version([sample(weight_versions=["0"])]) == "0"
    assert scoring.one_version([]) == ""


def test_the_student_that_scores_is_the_one_that_wrote() -> None:
    async def body() -> None:
        async with engines() as stage:
            one = sample(weight_versions=["6"])
            one.teacher_topk_token_ids = [[1, 2]] * 3
            with pytest.raises(VersionUnknown, match="wanted '6', which wrote it"):
                await StudentScoring(stage.client).score([one])
            one.weight_versions = ["7"]
            await StudentScoring(stage.client).score([one, sample(0, 1, length=0)])
            assert [len(row) for row in one.student_at_teacher_topk_log_probs or []] == [2, 2, 2]

    run(body())


def test_an_engine_that_refuses_fails_the_stage() -> None:
    async def body() -> None:
        async with engines() as stage:
            one = sample(tokens=[1, 2, 99_999], response_length=1, rollout_log_probs=[-0.1])
            stage.sims[Role.TEACHER].engine.crash = lambda reason: None  # type: ignore[method-assign]
            with pytest.raises(RelaxError):
                await TeacherScoring(stage.client, TeacherSettings(timeout_seconds=1.0)).score([one])

    run(body())
