"""Every way a plan is refused, one class per rule (exit code 3).

`rule` is the rule in one sentence; the table of docs/placement.md is generated from these classes and from the run
files that break them in the tests (tools/placement_rules.py). The message of an instance says which key broke it and
with which numbers; `code` and `detail.rule` say which rule in JSON.
"""

from __future__ import annotations

from typing import ClassVar

from relax_slurm.errors import PlanRefused


class Refusal(PlanRefused):
    """Base of all placement refusals."""

    rule: ClassVar[str] = ""

    def __init__(self, message: str) -> None:
        super().__init__(message, detail={"rule": self.rule})


class UnknownPool(Refusal):
    """A role or training names a pool that is not there."""

    code = "unknown_pool"
    rule = "Every role and training name a pool that the run file defines."


class PoolUnused(Refusal):
    """GPUs would be allocated for nobody."""

    code = "pool_unused"
    rule = "Every pool is used by a role or by training."


class BudgetMissing(Refusal):
    """Neither role nor model says how many GPUs it gets."""

    code = "budget_missing"
    rule = "Each model has a GPU budget: its own, or the role's if it is the only model or a teacher's."


class BudgetSum(Refusal):
    """Models and role disagree."""

    code = "budget_sum"
    rule = "The budgets of a role's models add up to the role's budget."


class TeacherBudget(Refusal):
    """A teacher budget that cannot be shared evenly."""

    code = "teacher_budget"
    rule = "A teacher's budget divides evenly over its models unless each model names its own."


class GroupSum(Refusal):
    """Groups and model disagree."""

    code = "group_sum"
    rule = "The budgets of a model's groups add up to the model's budget."


class BudgetDivision(Refusal):
    """Some GPUs would be left over."""

    code = "budget_division"
    rule = "A budget is a whole number of engines."


class ParallelismMismatch(Refusal):
    """The engine would use another number of GPUs than it is given."""

    code = "parallelism_mismatch"
    rule = "tp_size x pp_size equals gpus_per_engine."


class DataParallelDivision(Refusal):
    """DP attention that does not divide the tensor-parallel group."""

    code = "data_parallel_division"
    rule = "With enable_dp_attention, tp_size is divisible by dp_size."


class DataParallelWithoutAttention(Refusal):
    """Plain data parallelism multiplies the GPUs of an engine."""

    code = "data_parallel_without_attention"
    rule = "dp_size above 1 needs enable_dp_attention; without it, replicas do the same."


class WholeNodes(Refusal):
    """A multi-node engine that would leave part of a node."""

    code = "whole_nodes"
    rule = "An engine larger than a node uses whole nodes, starting at the first GPU of one."


class EngineStraddlesNodes(Refusal):
    """An engine that fits a node but would lie on two."""

    code = "engine_straddles_nodes"
    rule = "An engine that fits on one node lies on one node."


class SliceOutOfPool(Refusal):
    """A role reaches past the end of its pool."""

    code = "slice_out_of_pool"
    rule = "A role's bundles lie inside its pool."


class SliceOverlap(Refusal):
    """Two roles claim the same bundles at the same time."""

    code = "slice_overlap"
    rule = "Roles that may be resident together do not share a bundle."


class CoResident(Refusal):
    """Two roles, or a role and training, in one pool without a layout that allows it."""

    code = "co_resident"
    rule = "In a decoupled layout every role, and training, has a pool of its own."


class ActorPoolMissing(Refusal):
    """A shared layout without anything to share."""

    code = "actor_pool_missing"
    rule = "A shared layout (split, defer) has a training section: its pool is the actor pool."


class OutsideActorPool(Refusal):
    """A role of a shared layout elsewhere."""

    code = "outside_actor_pool"
    rule = "In a shared layout every managed role lies in the actor pool."


class OffloadNeeded(Refusal):
    """Somebody could not make room."""

    code = "offload_needed"
    rule = "In a shared layout training and every role can offload."


class DeferredRole(Refusal):
    """The policy cannot be deferred."""

    code = "deferred_role"
    rule = "Only genrm and teacher may be deferred."


class DeferredOutsideDefer(Refusal):
    """A deferred role in a layout without phases."""

    code = "deferred_outside_defer"
    rule = "A deferred role needs placement: defer."


class MixedDeferral(Refusal):
    """A judge or teacher that is not deferred beside phases."""

    code = "mixed_deferral"
    rule = "Under placement: defer every managed judge and teacher is deferred."


class DeferOffset(Refusal):
    """Phases start at the beginning."""

    code = "defer_offset"
    rule = "Under placement: defer every role starts at bundle 0."


class DeferManyGroups(Refusal):
    """Phases hold one judge model and one group of policy engines."""

    code = "defer_many_groups"
    rule = "Under placement: defer there is one genrm model and one regular rollout group."


class MixedWorkerTypes(Refusal):
    """Regular engines beside prefill or decode."""

    code = "mixed_worker_types"
    rule = "A model has either regular groups or prefill and decode groups."


class PrefillDecodePair(Refusal):
    """Half of a disaggregated pair."""

    code = "prefill_decode_pair"
    rule = "Prefill needs decode and decode needs prefill."


class DisaggregationRoute(Refusal):
    """Prefill and decode workers are reached through a router only."""

    code = "disaggregation_route"
    rule = "A model with prefill and decode groups has route_mode SGLANG_ROUTER."


class NothingServes(Refusal):
    """Only placeholders."""

    code = "nothing_serves"
    rule = "A model has at least one group that starts engines."


class ExternalShared(Refusal):
    """External engines hold no bundles, so they cannot share any."""

    code = "external_shared"
    rule = "External rollout is not part of a shared layout."


class ExternalBesideManaged(Refusal):
    """External rollout and managed static models."""

    code = "external_beside_managed"
    rule = "External rollout does not stand beside managed judges or teachers."


class TrainingBudget(Refusal):
    """Training's own numbers do not fit."""

    code = "training_budget"
    rule = "Training's components add up to its budget, and the budget fits its pool."


class SingleJobShape(Refusal):
    """One homogeneous job cannot have two kinds of node."""

    code = "single_job_shape"
    rule = "job_shape: single needs pools with one node shape and no head component."


class HetJobShape(Refusal):
    """A heterogeneous job that Slurm or the site would not take."""

    code = "het_job_shape"
    rule = "A heterogeneous job has 2 to 128 components on a site that allows it."


class PortOverflow(Refusal):
    """Beyond the last port there is."""

    code = "port_overflow"
    rule = "Every port is at most 65535."


class PortSpan(Refusal):
    """The window is too small for one node's engines."""

    code = "port_span"
    rule = "The port window holds all engines of a node."


class PortEphemeral(Refusal):
    """The kernel gives these ports away."""

    code = "port_ephemeral"
    rule = "The port window lies outside the ephemeral range and above 1023."


ALL: tuple[type[Refusal], ...] = tuple(Refusal.__subclasses__())
"""All refusals in the order of this file."""
