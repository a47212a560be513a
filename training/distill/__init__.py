"""Distillation of united experts: layer by layer over captured rows, then end to end."""

from training.distill.config import DistillConfig
from training.distill.expert import Experts
from training.distill.fit import DistillError
from training.distill.report import LayerResult, RefineResult
from training.distill.run import distill
from training.distill.united import beside, load_united, save_united

__all__ = [
    "DistillConfig",
    "DistillError",
    "Experts",
    "LayerResult",
    "RefineResult",
    "beside",
    "distill",
    "load_united",
    "save_united",
]
