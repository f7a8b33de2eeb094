"""What can go wrong while a batch is made. What others hear of it is the coordinator's word."""

from __future__ import annotations

from relax_slurm.errors import ConfigError, EngineFailed, PlanRefused


class BatchNotMade(EngineFailed):
    """A batch failed while it was made; training gets nothing of it."""

    code = "batch_not_made"


class BadPrompts(ConfigError):
    """A prompt file that cannot be used; the message names file and line."""

    code = "bad_prompts"


class BatchRefused(PlanRefused):
    """Batches of this kind cannot be made with this placement (docs/batches.md, What is refused)."""

    code = "batch_refused"


class IllegalStage(BatchNotMade):
    """A step of a batch that its table does not know in this stage; nothing was changed."""

    code = "illegal_stage"


class StagingRefused(BatchNotMade):
    """Samples that cannot be captured: too many, or one that is there already."""

    code = "staging_refused"


class IncompleteGroup(BatchNotMade):
    """A group with fewer finished samples than a prompt must have."""

    code = "incomplete_group"


class ScoreInvalid(BatchNotMade):
    """A score that is missing, ill-shaped or not a finite number. The samples it belongs to were not touched."""

    code = "score_invalid"


class VersionUnknown(BatchNotMade):
    """The student's weights are of no known version, or of more than one."""

    code = "weight_version_unknown"


class PublishFailed(BatchNotMade):
    """A partition could not be written; nobody may read it."""

    code = "publish_failed"


class PartitionExists(PublishFailed):
    """There is a partition of this name already: somebody else's, which is left as it is."""

    code = "partition_exists"


class PartitionMissing(BatchNotMade):
    """A partition that is not there (any more)."""

    code = "partition_missing"


class PartitionDamaged(BatchNotMade):
    """A partition whose files are not what its manifest says."""

    code = "partition_damaged"


class NotConsumed(EngineFailed):
    """A committed batch was not consumed in time; the next one was not begun."""

    code = "not_consumed"


class NotReleased(BatchNotMade):
    """The batch failed and a role may still be on its GPUs; they stay fenced until `recover` finds them free."""

    exit_code, http_status, code = 9, 503, "not_released"
