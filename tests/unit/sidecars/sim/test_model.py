"""Determinism and probabilities of the simulated model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecars.sim import tokenizer
from sidecars.sim.model import Model, Weights, fingerprint
from sidecars.sim.protocol import Logprobs, Sampling

WEIGHTS = Weights("m", "default", fingerprint(0, "m"))
OTHER = Weights("m", "1", fingerprint(0, "m2"))
NOISE = Weights("m", "default", fingerprint(0, "m"), garbled=True)
TOKENS = st.lists(st.integers(0, 511), min_size=1, max_size=40)


def model(role: str = "rollout", error_rate: float = 0.0, **changes: int) -> Model:
    fields = {"seed": 0, "vocab_size": 512, "context_length": 4096, **changes}
    return Model(role, fields["seed"], error_rate, fields["vocab_size"], fields["context_length"])


def said(text: str, sampling: Sampling | None = None, made: Model | None = None, weights: Weights = WEIGHTS) -> str:
    run = (made or model()).run(tokenizer.encode(text), sampling or Sampling(200), weights)
    return tokenizer.decode(run.output[: run.visible])


@given(TOKENS, st.data())
def test_probabilities_add_up_to_one(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    every = model().of(WEIGHTS, tokens, position, range(512))
    assert math.isclose(math.fsum(math.exp(value) for value, _ in every), 1.0)
    best = model().top(WEIGHTS, tokens, position, 512)
    assert sorted(best) == sorted(every)
    assert [value for value, _ in best] == sorted((value for value, _ in best), reverse=True)
    by_token = {token: value for value, token in every}
    assert by_token[tokens[position]] == model().logprob(WEIGHTS, tokens, position)


def test_a_score_is_the_value_that_was_reported_when_it_was_generated() -> None:
    made = model()
    prompt = tuple(tokenizer.encode("What is 12 + 30?"))
    run = made.run(prompt, Sampling(50), WEIGHTS)
    generated = made.describe(run, WEIGHTS, Logprobs(len(prompt)), len(run.output))["output_token_logprobs"]
    scored_run = made.run(prompt + run.output, Sampling(0), WEIGHTS)
    scored = made.describe(scored_run, WEIGHTS, Logprobs(len(prompt) - 1), 0)["input_token_logprobs"]
    assert scored[0] == [None, prompt[-1], None]
    assert scored[1:] == generated
    assert made.logprob(OTHER, prompt, 3) != made.logprob(WEIGHTS, prompt, 3)


def test_the_policy_is_right_at_the_chosen_rate() -> None:
    made = model(error_rate=0.1)
    prompts = [f"{a}+{b}=" for a in range(20) for b in range(20)]
    wrong = sum(said(prompt, made=made) != str(eval(prompt[:-1])) for prompt in prompts)
    assert 20 <= wrong <= 60


def test_the_sampling_seed_changes_which_prompts_go_wrong() -> None:
    made = model(error_rate=0.5)
    answers = {said("7*6=", Sampling(20, seed=seed), made) for seed in range(20)}
    assert len(answers) > 1
    assert "42" in answers


def test_roles() -> None:
    assert said("2+3=") == "5"
    assert said("2+3=", made=model("genrm")) == "0"
    assert said("2+3=5", made=model("genrm")) == "1"
    assert len(said("2+3=", made=model("teacher"))) > 5


def test_noise_in_the_weights_is_heard() -> None:
    assert said("2+3=", weights=NOISE) != "5"


def test_lengths_and_stops() -> None:
    made, prompt = model("teacher"), tokenizer.encode("go on")
    full = made.run(prompt, Sampling(100, ignore_eos=True), WEIGHTS)
    assert len(full.output) == 100
    assert full.finish == {"type": "length", "length": 100}
    text = tokenizer.decode(full.output)
    stop = text[10:13]
    cut = made.run(prompt, Sampling(100, stop=(stop,), ignore_eos=True), WEIGHTS)
    assert cut.finish == {"type": "stop", "matched": stop}
    assert tokenizer.decode(cut.output[: cut.visible]) == text[: text.index(stop)]
    kept = made.run(prompt, Sampling(100, stop=(stop,), ignore_eos=True, no_stop_trim=True), WEIGHTS)
    assert tokenizer.decode(kept.output[: kept.visible]).endswith(stop)
    free = made.run(prompt, Sampling(None), WEIGHTS)
    by_id = made.run(prompt, Sampling(None, stop_token_ids=frozenset({free.output[4]})), WEIGHTS)
    assert by_id.finish["matched"] == free.output[4]
    ignored = made.run(prompt, Sampling(100, stop_token_ids=frozenset({full.output[4]}), ignore_eos=True), WEIGHTS)
    assert ignored.finish == full.finish, "ignore_eos ignores every token that stops"
    assert made.run(prompt, Sampling(0), WEIGHTS).output == ()
    ended = made.run(prompt, Sampling(None), WEIGHTS)
    assert ended.finish == {"type": "stop", "matched": tokenizer.EOS}
    assert ended.output[-1] == tokenizer.EOS
    assert ended.visible == len(ended.output) - 1


@given(st.text(max_size=80))
def test_text_survives_the_tokenizer(text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == clean


@given(st.text(max_size=30))
def test_a_prefix_of_tokens_is_a_prefix_of_text(text: str) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for cut in range(len(ids) + 1):
        assert whole.startswith(tokenizer.decode(ids[:cut], final=False))


def test_special_tokens() -> None:
    ids = [104, tokenizer.EOS, 300]
    assert tokenizer.decode(ids) == "h"
    assert tokenizer.decode(ids, skip_special=False) == "h<|eos|><|300|>"
    assert tokenizer.token_text(65) == "A"


@pytest.mark.parametrize("garbled", [False, True])
def test_everything_repeats(garbled: bool) -> None:
    weights = NOISE if garbled else WEIGHTS
    first, second = (model("teacher").run([1, 2, 3], Sampling(60, seed=4), weights) for _ in range(2))
    assert first == second
