"""What the planner is asked: systems, clusters, lengths and the link between them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from prfaas.capacity.lengths import LengthDistribution
from prfaas.capacity.prefill_profile import PrefillTime
from prfaas.core import ClusterKind
from prfaas.errors import ConfigError
from prfaas.spec import ModelSpec


def _check_positive(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{attribute.name} is {value!r}; it must be finite and greater than 0")


def _check_not_negative(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{attribute.name} is {value!r}; it must be finite and at least 0")


def _copied(systems: Mapping[str, System]) -> dict[str, System]:
    """A later change of the caller's mapping must not reach a frozen problem."""
    return dict(systems)


class Objective(enum.Enum):
    """What is made large. They differ only where the planner may choose how much to buy."""

    THROUGHPUT = "throughput"
    THROUGHPUT_PER_PRICE = "throughput per price"


@attrs.frozen(kw_only=True)
class System:
    """One kind of instance: a machine or a group of GPUs that holds the model once.

    Attributes:
        prefill: measured T_prefill of one instance.
        num_gpus: GPUs per instance.
        price_per_hour: of one instance, in any currency or relative to another system; None when
            not known.
        decode_step_s: T_decode; batch_size: BS_max within the SLO. None on a system that never
            decodes.
    """

    name: str
    prefill: PrefillTime
    num_gpus: int = attrs.field(validator=_check_positive)
    price_per_hour: float | None = attrs.field(default=None, validator=_check_positive)
    decode_step_s: float | None = attrs.field(default=None, validator=_check_positive)
    batch_size: float | None = attrs.field(default=None, validator=_check_positive)

    def decode_rps(self, output_tokens: float) -> float:
        """Requests per second that one instance decodes; 0 when it never decodes."""
        if self.decode_step_s is None or self.batch_size is None:
            return 0.0
        return self.batch_size / (self.decode_step_s * output_tokens)


@attrs.frozen(kw_only=True)
class PlanningCluster:
    """A cluster of equal instances.

    Attributes:
        system: a key of ``PlanningProblem.systems``.
        num_nodes: its instances.
        egress_bps: most that leaves this PRFAAS cluster, of ``PlanningProblem.egress_bps``; None
            if only that bounds it.
    """

    cluster_id: str
    kind: ClusterKind
    system: str
    num_nodes: float = attrs.field(validator=_check_not_negative)
    egress_bps: float | None = attrs.field(default=None, validator=_check_positive)


def _in_order(clusters: Iterable[PlanningCluster]) -> tuple[PlanningCluster, ...]:
    return tuple(clusters)


@attrs.frozen(kw_only=True)
class PlanningProblem:
    """A question for `plan_deployment`.

    How many gateways route the requests is no part of it: gateways share the same clusters and
    the same egress, so more of them only split the arrival rate.

    Attributes:
        lengths: the law of the uncached prompt lengths.
        output_tokens: L_out, mean tokens generated per request.
        egress_bps: what all PRFAAS clusters share.
        egress_share_of_others: the part of that egress that other traffic takes, from 0 to 1.
        rtt_s: added once to the time to first token of a request that is prefilled remotely.
        max_prfaas_nodes: choose the size of every PRFAAS cluster from 0 to this many instances;
            None keeps the sizes as they are.
    """

    model: ModelSpec
    lengths: LengthDistribution
    output_tokens: float = attrs.field(validator=_check_positive)
    systems: Mapping[str, System] = attrs.field(converter=_copied)
    clusters: tuple[PlanningCluster, ...] = attrs.field(converter=_in_order)
    egress_bps: float = attrs.field(validator=_check_positive)
    egress_share_of_others: float = 0.0
    rtt_s: float = attrs.field(default=0.0, validator=_check_not_negative)
    objective: Objective = Objective.THROUGHPUT
    max_prfaas_nodes: int | None = attrs.field(default=None, validator=_check_positive)

    def __attrs_post_init__(self) -> None:
        """Check what spans several fields."""
        if not 0 <= self.egress_share_of_others < 1:
            raise ConfigError(
                f"egress_share_of_others is {self.egress_share_of_others!r}; it must be at least "
                "0 and below 1"
            )
        self._check_clusters()
        if self.objective is Objective.THROUGHPUT_PER_PRICE and self.cost_per_hour is None:
            raise ConfigError(
                "the objective is throughput per price but not every system has a price; set "
                "price_per_hour, if need be relative to one system"
            )

    def _check_clusters(self) -> None:
        seen = set()
        for cluster in self.clusters:
            if cluster.cluster_id in seen:
                raise ConfigError(f"cluster {cluster.cluster_id!r} is given twice; name it anew")
            seen.add(cluster.cluster_id)
            system = self.systems.get(cluster.system)
            if system is None:
                raise ConfigError(
                    f"cluster {cluster.cluster_id!r} is of system {cluster.system!r}; known are "
                    f"{sorted(self.systems)}"
                )
            if cluster.kind is ClusterKind.PD and system.decode_rps(self.output_tokens) == 0:
                raise ConfigError(
                    f"cluster {cluster.cluster_id!r} decodes, but system {cluster.system!r} has "
                    "no decode_step_s and batch_size; set both"
                )
        if not any(cluster.num_nodes > 0 for cluster in self.pd):
            raise ConfigError("no PD cluster has an instance; requests must be decoded somewhere")

    @property
    def prfaas(self) -> tuple[PlanningCluster, ...]:
        """The PRFAAS clusters, in the order given."""
        return tuple(c for c in self.clusters if c.kind is ClusterKind.PRFAAS)

    @property
    def pd(self) -> tuple[PlanningCluster, ...]:
        """The PD clusters, in the order given."""
        return tuple(c for c in self.clusters if c.kind is ClusterKind.PD)

    @property
    def num_gpus(self) -> float:
        """GPUs of all clusters."""
        return sum(c.num_nodes * self.systems[c.system].num_gpus for c in self.clusters)

    @property
    def cost_per_hour(self) -> float | None:
        """Price of all instances per hour; None when a price is not known."""
        total = 0.0
        for cluster in self.clusters:
            price = self.systems[cluster.system].price_per_hour
            if price is None:
                return None
            total += cluster.num_nodes * price
        return total

    def usable_egress_bps(self, cluster: PlanningCluster | None = None) -> float:
        """B_out that is left for caches: out of one PRFAAS cluster, or of all together."""
        own_bps = None if cluster is None else cluster.egress_bps
        egress_bps = self.egress_bps if own_bps is None else min(own_bps, self.egress_bps)
        return egress_bps * (1 - self.egress_share_of_others)
