"""Prompt sets: what is asked of a model, how long the answers may be, and under which load.

`load` reads a bundled workload, a file or a data set from the hub; `available` names the bundled ones.
"""

from specbench.workloads.library import available, load, load_many, with_twins
from specbench.workloads.loads import Load, poisson_arrivals
from specbench.workloads.prompt import Message, Prompt
from specbench.workloads.workload import Headline, Workload

__all__ = [
    "Headline",
    "Load",
    "Message",
    "Prompt",
    "Workload",
    "available",
    "load",
    "load_many",
    "poisson_arrivals",
    "with_twins",
]
