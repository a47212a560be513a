"""Distillation of united experts: layer by layer over captured rows, then end to end."""

from training.distill.config import DistillConfig
from training.distill.fit import DistillError
from training.distill.report import LayerResult, RefineResult
from training.distill.run import beside, distill

__all__ = ["DistillConfig", "DistillError", "LayerResult", "RefineResult", "beside", "distill"]
