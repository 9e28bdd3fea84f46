"""Models by name: `resolve` turns what a user wrote into files here, `load` turns those into a model.

Everything a caller needs is named here; which host, folder or file format a model came from ends here too.
Nothing in this package imports torch or transformers before it loads a model.
"""

from specbench.models.load import LoadedModel, load, require_device, require_dtype
from specbench.models.resolve import ResolvedModel, aliases, is_here, resolve
from specbench.models.vocabulary import check_vocabulary, fit_vocabulary

__all__ = [
    "LoadedModel",
    "ResolvedModel",
    "aliases",
    "check_vocabulary",
    "fit_vocabulary",
    "is_here",
    "load",
    "require_device",
    "require_dtype",
    "resolve",
]
