"""What can go wrong with a batch. All of it is a `BatchFailed`, a `ConfigError` or a `PlanRefused` to the user."""

from __future__ import annotations

from relax_slurm.errors import BatchFailed, ConfigError, PlanRefused


class BadPrompts(ConfigError):
    """A prompt file that cannot be used; the message names file and line."""

    code = "bad_prompts"


class BatchRefused(PlanRefused):
    """Batches of this kind cannot be made with this placement (docs/batches.md, What is refused)."""

    code = "batch_refused"


class IllegalStage(BatchFailed):
    """A step of a batch that its table does not know in this stage; nothing was changed."""

    code = "illegal_stage"


class StagingRefused(BatchFailed):
    """Samples that cannot be captured: too many, or one that is there already."""

    code = "staging_refused"


class IncompleteGroup(BatchFailed):
    """A group with fewer finished samples than a prompt must have."""

    code = "incomplete_group"


class ScoreInvalid(BatchFailed):
    """A score that is missing, ill-shaped or not a finite number. The samples it belongs to were not touched."""

    code = "score_invalid"


class VersionUnknown(BatchFailed):
    """The student's weights are of no known version, or of more than one."""

    code = "weight_version_unknown"


class PublishFailed(BatchFailed):
    """A partition could not be written; nobody may read it."""

    code = "publish_failed"


class PartitionMissing(BatchFailed):
    """A partition that is not there (any more)."""

    code = "partition_missing"


class PartitionDamaged(BatchFailed):
    """A partition whose files are not what its manifest says."""

    code = "partition_damaged"


class ReleaseUnconfirmed(BatchFailed):
    """The batch failed and a role may still be on its GPUs; they stay fenced until `recover` finds them free."""

    exit_code, http_status, code = 9, 503, "release_unconfirmed"
