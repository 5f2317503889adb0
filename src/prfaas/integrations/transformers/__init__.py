"""Engines for models of the transformers library; needs the extra ``prfaas[transformers]``."""

from prfaas.errors import MissingExtra

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingExtra(package=error.name or "transformers", extra="transformers") from error

from prfaas.integrations.transformers.engine import TransformersEngine
from prfaas.integrations.transformers.linear_attention import use_kernels
from prfaas.integrations.transformers.random_models import FAMILIES, random_model

__all__ = ["FAMILIES", "TransformersEngine", "random_model", "use_kernels"]
