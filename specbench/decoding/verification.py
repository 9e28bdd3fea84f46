"""The verification rules by the names users type, and the contract they share.

Lossless: `rejection` and `exact` for chains and trees, `block` for chains. Lossy, for chains: `typical`,
`threshold` and `top-k`.
"""

from __future__ import annotations

from typing import Literal

from specbench.decoding.block import BlockVerification
from specbench.decoding.exact_match import ExactMatch
from specbench.decoding.lossy import Threshold, TopK, Typical
from specbench.decoding.proposal import Acceptance, Proposal, Rule
from specbench.decoding.rejection import RejectionSampling

__all__ = [
    "RULES",
    "Acceptance",
    "BlockVerification",
    "ExactMatch",
    "Proposal",
    "RejectionSampling",
    "Rule",
    "RuleName",
    "Threshold",
    "TopK",
    "Typical",
]

RuleName = Literal["rejection", "exact", "block", "typical", "threshold", "top-k"]
"""What a chain drafter's `verify` option can be."""

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (RejectionSampling, ExactMatch, BlockVerification, Typical, Threshold, TopK)
}
"""The rules by name."""
