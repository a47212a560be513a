"""Shares of many answers' tokens, with an interval: the audit's figures, and `jmoe evaluate`'s."""

import math

import numpy as np
from jaxtyping import Num


def ratio(parts: Num[np.ndarray, " n"], wholes: Num[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns sum(parts) / sum(wholes) of answers, and half of its 95 % interval (the ratio
    estimator's variance; answers are independent, an answer's tokens are not). NaN without data; an
    infinite half of one answer.
    """
    whole, count = wholes.sum(), len(wholes)
    if not whole:
        return math.nan, math.nan
    mean = float(parts.sum() / whole)
    if count < 2:
        return mean, math.inf
    variance = np.sum((parts - mean * wholes) ** 2) / whole**2 * count / (count - 1)
    return mean, 1.96 * math.sqrt(variance)
