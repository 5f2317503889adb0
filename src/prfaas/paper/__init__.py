"""What arXiv 2604.15039 published, and what can be derived from it."""

from __future__ import annotations

from prfaas.paper.case_study import Rates, claim_cells, solve, table_6_cells
from prfaas.paper.cells import Cell, Kind, max_error_pct
from prfaas.paper.model_cells import (
    bandwidth_cells,
    implied_profile,
    model_claim_cells,
    table_3_cells,
    table_5_cells,
)
from prfaas.paper.profiles import (
    ALL_LOCAL_TOKENS,
    ALL_REMOTE_TOKENS,
    CASE_STUDY,
    H20,
    H20_PRICE,
    H200,
    H200_PRICE,
    HOMOGENEOUS,
    LENGTHS,
    NAIVE,
    THRESHOLD_TOKENS,
)
from prfaas.paper.tables import Printed, printed
from prfaas.paper.ttft import mean_ttft_s, p90_ttft_s

__all__ = [
    "ALL_LOCAL_TOKENS",
    "ALL_REMOTE_TOKENS",
    "CASE_STUDY",
    "H20",
    "H20_PRICE",
    "H200",
    "H200_PRICE",
    "HOMOGENEOUS",
    "LENGTHS",
    "NAIVE",
    "THRESHOLD_TOKENS",
    "Cell",
    "Kind",
    "Printed",
    "Rates",
    "all_cells",
    "bandwidth_cells",
    "claim_cells",
    "implied_profile",
    "max_error_pct",
    "mean_ttft_s",
    "model_claim_cells",
    "p90_ttft_s",
    "printed",
    "solve",
    "table_3_cells",
    "table_5_cells",
    "table_6_cells",
]


def all_cells(rates: Rates) -> list[Cell]:
    """Every printed figure beside ours; ``rates`` of the mean form, as the paper computes."""
    return [
        *table_3_cells(),
        *table_5_cells(),
        *table_6_cells(rates),
        *claim_cells(rates),
        *bandwidth_cells(),
        *model_claim_cells(),
    ]
