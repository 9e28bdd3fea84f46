"""A workload, and how a smaller one is taken from it without changing its mix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specbench.errors import WorkloadError
from specbench.workloads.loads import Load
from specbench.workloads.prompt import Prompt

Headline = Literal["decode", "e2e", "throughput"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how they are to be run.

    `digest` is the SHA-256 of the prompt file (with Unix line ends), or of the prompts themselves when
    they come from the hub. A limited workload keeps the digest of the whole: together with the number
    of its prompts it says exactly which they are. `available` is the number before any limit.
    `headline` is the speedup that a summary quotes first. `without_grammar` asks for the same prompts once
    more without their grammars, a workload whose `twin_of` names this one.
    """

    name: str
    description: str
    licence: str
    digest: str
    prompts: tuple[Prompt, ...]
    temperatures: tuple[float, ...]
    max_new_tokens: int
    loads: tuple[Load, ...]
    headline: Headline
    available: int
    source: str
    without_grammar: bool = False
    twin_of: str | None = None

    def free(self) -> Workload:
        """Return the same prompts without their grammars, as a workload beside this one."""
        return replace(
            self,
            name=f"{self.name}-free",
            description=f"{self.name} without its grammars",
            prompts=tuple(replace(prompt, grammar=None) for prompt in self.prompts),
            without_grammar=False,
            twin_of=self.name,
        )

    def limited(self, limit: int) -> Workload:
        """Return a workload of at most `limit` prompts with the same mix of categories.

        Nothing is random: the prompts of a smaller limit are the first ones of a larger limit.

        Raises:
            WorkloadError: The limit is below 1.
        """
        if limit < 1:
            raise WorkloadError(
                f"the limit of prompts for '{self.name}' must be at least 1, not {limit}",
                hint="leave the limit out to use every prompt",
            )
        order = stratified([prompt.category for prompt in self.prompts])
        return replace(self, prompts=tuple(self.prompts[index] for index in order[:limit]))


def stratified(categories: Sequence[str]) -> list[int]:
    """Return the order in which every prefix represents the categories.

    The i-th item (from 0) of a category with n items is due at i / n: first comes one item of each
    category, and then each in proportion to its size. Equal sizes give a plain round robin. Ties keep
    the order in which the categories first appear.
    """
    sizes = Counter(categories)
    ranks = {category: rank for rank, category in enumerate(sizes)}
    seen: Counter[str] = Counter()
    due = []
    for index, category in enumerate(categories):
        due.append((seen[category] / sizes[category], ranks[category], index))
        seen[category] += 1
    return [index for _, _, index in sorted(due)]
