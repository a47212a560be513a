"""Compares figures of a model with those that a paper prints or a simulation gives."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

PAPERS = json.loads(Path(__file__).with_name("papers.json").read_text(encoding="utf-8"))


def errors(pairs: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Returns how far off figures are, of pairs (right, found): relative errors and factors."""
    factors = np.array([found / right for right, found in pairs])
    return {
        "count": len(factors),
        "mean_absolute": fmean(np.abs(factors - 1)),
        "mean": fmean(factors - 1),
        "factor": float(np.exp(np.abs(np.log(factors)).mean())),
        "least": float(factors.min()),
        "most": float(factors.max()),
    }
