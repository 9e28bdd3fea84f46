"""Block verification's accepted lengths, judged in a real audit: right ones, and ones that are too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specbench.audit import session
from specbench.audit.acceptance import BlockAcceptance
from specbench.audit.self_test import Bench, Job, cases
from specbench.decoding.distribution import Distribution
from specbench.decoding.proposal import Proposal
from specbench.decoding.verification import BlockVerification
from specbench.runtime.protocols import Strategy

SPEC = "draft:k=3,verify=block"
BATCHES = 2
"""Of 64 sequences with the strategy's own draft: more than 400 rounds."""


class Eager(BlockVerification):
    """Throw coins that fall on the side of acceptance."""

    def decide(
        self, p: Distribution, proposal: Proposal, joint: Tensor, coins: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Decide by coins that are half as large."""
        return super().decide(p, proposal, joint, coins / 2)


def eager(strategy: Strategy) -> Strategy:
    """Plant it."""
    return replace(strategy, rule=Eager())


@pytest.fixture(scope="module")
def bench() -> Bench:
    """One toy engine for all."""
    return Bench()


def judged(bench: Bench, alter: session.Alter, seed: int) -> BlockAcceptance:
    """Return what was found of the first rounds, whatever other tests say."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    auditor = session.Auditor(
        bench.subject(Job(cases([SPEC])[0], seed)), SPEC, alter, lambda _: None, regimes=("own",)
    )
    for _ in range(BATCHES):
        auditor.draw_from(auditor.regimes[0])
    torch.set_num_threads(threads)
    assert isinstance(auditor.acceptance, BlockAcceptance)
    assert auditor.acceptance.mixture.steps == session.BLOCK_ROUNDS
    return auditor.acceptance


@pytest.mark.parametrize("seed", [0, 1])
def test_right_blocks_are_left_alone(bench: Bench, seed: int) -> None:
    """No alarm, and an excess that chance explains."""
    found = judged(bench, lambda strategy: strategy, seed)
    assert not found.result().alarm
    assert abs(found.z) < 4


@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_that_are_accepted_too_often_are_found(bench: Bench, seed: int) -> None:
    """The accepted length exceeds the sum of rho."""
    found = judged(bench, eager, seed)
    assert found.result().alarm
    assert "more accepted" in found.result().words
