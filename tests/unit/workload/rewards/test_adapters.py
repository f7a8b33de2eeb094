"""The three adapters and their registry, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from relax_slurm.core.plan import Role
from relax_slurm.errors import BadRequest, ConfigError, RelaxError, Unauthorized, Unavailable, UpstreamFailed
from relax_slurm.forward import Exchange, HttpServer
from relax_slurm.workload.rewards.genrm import JudgeReward
from relax_slurm.workload.rewards.math import MathReward, judge
from relax_slurm.workload.rewards.posting import Poster
from relax_slurm.workload.rewards.registry import Registration, RewardContext, RewardRegistry
from relax_slurm.workload.rewards.remote import RemoteReward
from relax_slurm.workload.rewards.shipped import shipped
from tests.unit.workload.engines import engines
from tests.unit.workload.stage import FixedReward, sample

CUSTOM = Registration("custom", lambda context: FixedReward(), supports_deferred=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


class Service:
    """Answers one status and body after the other; the last one stays."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.pauses: list[float] = []
        self.server = HttpServer(self._handle)

    def _handle(self, exchange: Exchange) -> None:
        self.asked.append(json.loads(exchange.request.body))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        exchange.respond(status, body)

    async def sleep(self, seconds: float) -> None:
        """Nobody waits in a test."""
        self.pauses.append(seconds)


def served(test: Callable[[Service, str], Awaitable[None]], *answers: tuple[int, bytes]) -> Service:
    service = Service(*answers)

    async def body() -> None:
        url = f"http://127.0.0.1:{await service.server.start()}"
        try:
            await test(service, url)
        finally:
            await service.server.stop(0.2)

    run(body())
    return service


# --- posting ---------------------------------------------------------------------------------------------------------


def test_a_5xx_is_asked_again_with_growing_pauses() -> None:
    async def test(service: Service, url: str) -> None:
        poster = Poster(url, "t", sleep=service.sleep)
        assert await poster.post({"a": 1}) == {"x": 1}
        await poster.close()

    service = served(test, (500, b"no"), (503, b"later"), (200, b'{"x": 1}'))
    assert service.asked == [{"a": 1}] * 3
    assert service.pauses == [0.5, 1.0]


@pytest.mark.parametrize(
    ("answer", "kind", "match", "times"),
    [
        ((502, b"gone"), UpstreamFailed, "answered 502: gone .the last of 3 attempts", 3),
        ((503, b""), Unavailable, "answered 503", 3),
        ((400, b"bad"), BadRequest, "answered 400: bad", 1),
        ((401, b"who"), Unauthorized, "answered 401: who", 1),
        ((200, b"{"), UpstreamFailed, "not JSON", 1),
        ((200, b"[]"), UpstreamFailed, "wanted an object", 1),
    ],
)
def test_what_is_raised(answer: tuple[int, bytes], kind: type[RelaxError], match: str, times: int) -> None:
    async def test(service: Service, url: str) -> None:
        poster = Poster(url, sleep=service.sleep)
        with pytest.raises(kind, match=match):
            await poster.post({})
        await poster.close()

    assert len(served(test, answer).asked) == times


def test_a_connection_that_fails_is_tried_three_times() -> None:
    async def test(service: Service, url: str) -> None:
        await service.server.stop(0)
        poster = Poster(url, sleep=service.sleep)
        with pytest.raises((UpstreamFailed, Unavailable), match="last of 3 attempts"):
            await poster.post({})
        await poster.close()

    assert served(test, (200, b"{}")).pauses == [0.5, 1.0]


# --- math ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("42", "42", 1.0),
        ("it is 42", "42", 1.0),
        (r"\boxed{41} 42", "42", 0.0),
        ("", "42", 0.0),
        ("42", None, 0.0),
        ("yes", "Yes", 1.0),
    ],
)
def test_math(response: str, label: str | None, reward: float) -> None:
    assert judge(response, label)[0] == reward


def test_math_leaves_removed_samples_alone() -> None:
    async def body() -> None:
        removed = sample(remove_sample=True)
        one = sample()
        adapter = MathReward(RewardContext(deferred=True))
        await adapter.score([one, removed])
        await adapter.close()
        assert (one.reward, one.reward_detail) == (1.0, {"acc": True, "pred": "42"})
        assert removed.reward is None

    run(body())


# --- the judge -------------------------------------------------------------------------------------------------------


def context(url: str, *, deferred: bool = True, **options: Any) -> RewardContext:
    return RewardContext(deferred, url, "secret-token", options=options)


def test_the_judge_over_the_gateway() -> None:
    async def body() -> None:
        async with engines() as stage:
            right, wrong = sample(response=r"\boxed{42}"), sample(0, 1, response="Answer: 41")
            bare, long = sample(0, 2, response="42"), sample(0, 3, response=r"\boxed{" + "4" * 501 + "}")
            adapter = JudgeReward(context(stage.gateway_url))
            await adapter.score([right, wrong, bare, long])
            await adapter.close()
            assert [one.reward for one in (right, wrong, bare, long)] == [1.0, 0.0, 0.0, 0.0]
            assert right.reward_detail == {
                "score": 1.0,
                "acc": True,
                "pred": "42",
                "judge_response": "1",
                "format_error": False,
            }
            for one in (bare, long):
                assert one.reward_detail is not None
                assert one.reward_detail["format_error"] is True
            # Nobody was asked about the two without a short marked answer.
            judge_engine = stage.sims[Role.GENRM].engine
            assert judge_engine.scheduler.busy is False
            await (adapter := JudgeReward(context(stage.gateway_url, bare_answers=True))).score([bare])
            await adapter.close()
            assert bare.reward == 1.0

    run(body())


@pytest.mark.parametrize(
    ("said", "reward"), [("1", 1.0), ("It is: 1", 1.0), ("0", 0.0), (" " * 16 + "1", 0.0), ("yes", 0.0)]
)
def test_a_one_among_the_first_16_characters(said: str, reward: float) -> None:
    async def test(service: Service, url: str) -> None:
        one = sample(response=r"\boxed{42}")
        adapter = JudgeReward(context(url, model="judge", sampling={"max_new_tokens": 4}))
        await adapter.score([one])
        await adapter.close()
        assert one.reward == reward

    (asked,) = served(test, (200, json.dumps({"response": said}).encode())).asked
    content = "Question: What is 17 + 25?\nReference: 42\nAnswer: 42\nIs the answer right? Say 1 or 0."
    assert asked == {
        "messages": [{"role": "user", "content": content}],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4},
        "model": "judge",
    }


def test_a_judge_that_fails_fails_the_batch_or_costs_the_reward() -> None:
    async def test(service: Service, url: str) -> None:
        for deferred in (True, False):
            poster = Poster(url, sleep=service.sleep)
            one, other = sample(response=r"\boxed{42}"), sample(0, 1, remove_sample=True)
            adapter = JudgeReward(context(url, deferred=deferred), poster)
            if deferred:
                with pytest.raises(UpstreamFailed, match="answered 500"):
                    await adapter.score([one, other])
                assert one.reward is None
            else:
                await adapter.score([one, other])
                assert (one.reward, (one.reward_detail or {})["format_error"]) == (0.0, True)
            assert other.reward is None
            await adapter.close()

    served(test, (500, b"broken"))


def test_an_answer_without_a_response() -> None:
    async def test(service: Service, url: str) -> None:
        adapter = JudgeReward(context(url))
        with pytest.raises(UpstreamFailed, match="no response"):
            await adapter.score([sample(response=r"\boxed{1}")])
        await adapter.close()

    served(test, (200, b'{"text": "1"}'))


@pytest.mark.parametrize("template", ["{question}", "{answer} {nothing}", "{answer", "{answer} {}"])
def test_a_template_that_cannot_be_filled(template: str) -> None:
    with pytest.raises(ConfigError, match="template"):
        JudgeReward(context("http://h", template=template))


# --- a remote service -------------------------------------------------------------------------------------------------


def test_a_remote_reward() -> None:
    async def test(service: Service, url: str) -> None:
        one, removed = sample(metadata={"a": 1}), sample(0, 1, remove_sample=True)
        adapter = RemoteReward(RewardContext(False, options={"url": url}))
        await adapter.score([one, removed])
        await adapter.close()
        assert (one.reward, one.reward_detail, removed.reward) == (0.5, {"why": "half"}, None)

    service = served(test, (200, b'{"score": 0.5, "why": "half"}'))
    assert service.asked == [{"prompt": "What is 17 + 25?", "response": "42", "label": "42", "metadata": {"a": 1}}]


@pytest.mark.parametrize("body", [b'{"score": "1"}', b'{"score": true}', b"{}"])
def test_a_remote_reward_that_is_no_number(body: bytes) -> None:
    async def test(service: Service, url: str) -> None:
        adapter = RemoteReward(RewardContext(False, options={"url": url}))
        with pytest.raises(UpstreamFailed, match="wanted a finite number"):
            await adapter.score([sample()])
        await adapter.close()

    served(test, (200, body))


def test_a_remote_reward_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"batch\.reward\.url"):
        RemoteReward(RewardContext(False))


# --- the registry ----------------------------------------------------------------------------------------------------


def test_what_the_shipped_adapters_declare() -> None:
    registry = shipped()
    assert registry.deferrable() == ("math", "genrm")
    assert (registry["math"].role, registry["genrm"].role, registry["remote"].role) == (None, Role.GENRM, None)
    with pytest.raises(ConfigError, match=r"'genm' is not known, .*did you mean 'genrm'"):
        registry["genm"]
    with pytest.raises(ConfigError, match="registered twice"):
        RewardRegistry([registry["math"], registry["math"]])


def test_an_adapter_of_ones_own() -> None:
    assert shipped()[f"{__name__}:CUSTOM"].name == "custom"
    for name, match in (
        ("nowhere.at.all:X", "cannot be imported"),
        ("json:dumps", "wanted a Registration"),
        ("json:x", "cannot"),
    ):
        with pytest.raises(ConfigError, match=match):
            shipped()[name]
