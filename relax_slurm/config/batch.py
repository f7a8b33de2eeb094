"""The run file's `batch` section: how closed batches are made. What fits which placement is `workload.preflight`'s
business."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from relax_slurm.config.base import Count, Name, PathText, Seconds, Section, Text

OWNED_SAMPLING = {
    "n": "batch.n_samples_per_prompt",
    "sampling_seed": "batch.seed",
    "no_stop_trim": "nothing: it is always true, so that the text is that of the ids",
    "spaces_between_special_tokens": "nothing: it is always false, so that the text is that of the ids",
}
"""Sampling parameters that the tool writes itself, and what to use instead."""
Dotted = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$", max_length=400)]


def _sampling() -> dict[str, JsonValue]:
    return {"temperature": 1.0, "max_new_tokens": 256}


class RewardConfig(Section):
    """Where rewards come from."""

    adapter: Text = "math"
    """`math` (by rule), `genrm` (the run's judge), `remote` (a URL), or `module:NAME` of an adapter of your own."""
    model: Name | None = None
    """Judge model; null is the role's default."""
    template: Text | None = None
    """What the judge is asked; `{answer}` is filled in, and `{question}` and `{label}`. null asks for 1 or 0."""
    bare_answers: bool = False
    """Whether a response without a mark (`\\boxed{}` or `Answer:`) is taken as its own answer."""
    sampling: dict[str, JsonValue] = Field(default_factory=dict)
    """The judge's sampling parameters; temperature 0 and 32 tokens unless told otherwise."""
    url: Text | None = None
    """URL of the `remote` adapter."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests in flight."""
    timeout_seconds: Seconds = 1800.0
    """Time limit of one request."""


class TeacherConfig(Section):
    """How a teacher scores responses."""

    selection: Literal["student_sampled", "student_topk", "teacher_topk", "union"] = "student_sampled"
    """Whose tokens are compared: those of the response, the student's candidates, the teacher's, or both."""
    top_k: Annotated[int, Field(ge=1, le=256)] = 8
    """Candidates per position."""
    route_keys: dict[str, Text] = Field(default_factory=dict)
    """`data_source` of a prompt's metadata to route key. Sources that are route keys themselves need no entry."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 256
    """Requests in flight."""


class PublisherConfig(Section):
    """Where finished batches go."""

    kind: Literal["shared_fs", "transferqueue"] = "shared_fs"
    """Folders on the shared file system, or a TransferQueue (extra `transferqueue`)."""
    root: PathText | None = None
    """Folder of the partitions; null is `partitions` in the attempt's folder."""
    format: Literal["msgpack", "safetensors"] = "msgpack"
    """Form of the files; safetensors needs the extra `publishers`."""


class JobConfig(Section):
    """What the training job does beside this tool. It is told here so that what cannot be combined is refused before a
    GPU is taken; nothing else follows from it."""

    kind: Literal["rl", "sft", "dpo", "rm"] = "rl"
    """Kind of training. Only `rl` generates."""
    partial_rollout: bool = False
    """Whether unfinished responses go on in a later batch."""
    dynamic_batch: bool = False
    """Whether the number of groups in a batch is decided while it is made."""
    custom_reward: Dotted | None = None
    """A reward function of the job's own that is no registered adapter."""
    custom_convert: Dotted | None = None
    """A function of the job's own that makes the training batch."""
    custom_filter: Dotted | None = None
    """A function of the job's own that drops groups."""
    custom_rollout: Dotted | None = None
    """A generation function of the job's own."""
    transfer_adapter: bool = False
    """Whether `custom_rollout` hands its groups to a transfer adapter."""
    evaluation_data: bool = False
    """Whether evaluation prompts are generated between batches."""


class BatchConfig(Section):
    """Closed batches: generate, score, teach, publish, commit (docs/batches.md)."""

    batch_size: Count = 16
    """Prompts, and therefore groups, of one batch."""
    n_samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 4
    """Samples of one group."""
    oversample: Count | None = None
    """Prompts that are started for a batch; the first `batch_size` whole groups are taken, the rest is aborted. null
    starts `batch_size`."""
    sampling: dict[str, JsonValue] = Field(default_factory=_sampling)
    """SGLang's sampling parameters of the rollout."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the run; each sample's is this plus its number. null leaves it to the engine."""
    model: Name | None = None
    """Policy model; null is the role's default."""
    concurrency: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Rollout requests in flight."""
    incomplete_groups: Literal["refuse", "remove"] = "refuse"
    """What becomes of a group with failed or aborted samples: the batch fails, as GRPO needs it, or those samples stay
    without a loss."""
    reward: RewardConfig = RewardConfig()
    """Where rewards come from."""
    teacher: TeacherConfig | None = None
    """Teacher scoring; null leaves it out."""
    student_scoring: bool = False
    """Whether the policy scores the teacher's candidates; needs `teacher.selection` teacher_topk or union."""
    publisher: PublisherConfig = PublisherConfig()
    """Where batches go."""
    timeout_seconds: Seconds = 1800.0
    """Time limit of everything after generation."""
    generate_seconds: Seconds = 3600.0
    """Time limit of generation."""
    consumers: tuple[Name, ...] = ()
    """Consumers that must be done with a batch before the next one begins, so that it is generated with the weights
    that came of it. Empty waits for nobody."""
    consume_seconds: Seconds = 7200.0
    """How long to wait for them."""
    job: JobConfig = JobConfig()
    """What the training job does beside this tool."""

    @field_validator("sampling")
    @classmethod
    def _owned(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in value:
            if name in OWNED_SAMPLING:
                raise ValueError(f"has {name}, which the tool writes itself; use {OWNED_SAMPLING[name]}")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"has {name!r:.40}, which is no sampling parameter of SGLang")
        return value

    @model_validator(mode="after")
    def _fits(self) -> BatchConfig:
        if self.oversample is not None and self.oversample < self.batch_size:
            raise ValueError(f"has oversample {self.oversample} below batch_size {self.batch_size}; leave it out")
        if self.student_scoring and (self.teacher is None or self.teacher.selection not in {"teacher_topk", "union"}):
            raise ValueError(
                "has student_scoring without candidates to score; set teacher.selection to teacher_topk or union"
            )
        return self
