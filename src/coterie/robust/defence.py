"""The options of methods that make one model of several: which aggregator, and what it is told."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.options import Options
from coterie.robust.aggregators import AGGREGATORS, sageflow_weights

Aggregation = Literal[
    "mean", "median", "trimmed-mean", "geometric-median", "krum", "multi-krum", "norm-clipping", "sageflow"
]


class Defended(Options):
    """Averages models by one of the aggregators."""

    aggregation: Aggregation = "mean"
    """how models become one; all but mean are meant to survive some that lie"""
    assumed_malicious: float = Field(0.3, ge=0, lt=0.5)
    """trimmed-mean, krum, multi-krum: share of the models that may lie"""
    entropy_threshold: float = Field(1.0, ge=0, le=1e6)
    """sageflow: models whose predictions have a larger mean entropy, in nats, are left out"""
    loss_sharpness: float = Field(1.0, ge=0, le=1e6)
    """sageflow: weight is examples / loss to this power"""

    def aggregate(self, models: Tensor, weight: Tensor, start: Tensor) -> Tensor:
        """[P]: one model of the models [K, P] with weights [K], trained from `start` [P]. With sageflow the weights
        are those it gives, and the start stays if it trusts nobody."""
        if self.aggregation == "sageflow":
            return AGGREGATORS["mean"](models, weight, start, 0.0) if weight.any() else start
        return AGGREGATORS[self.aggregation](models, weight, start, self.assumed_malicious)

    def trusted(self, entropies: Tensor, losses: Tensor, weight: Tensor) -> Tensor:
        """[K]: sageflow's weights of models that somebody judged: entropies and losses [K]."""
        return sageflow_weights(entropies, losses, weight, self.entropy_threshold, self.loss_sharpness)


def middle(judgements: Tensor) -> Tensor:
    """[K]: the median of what several judges say [J, K], so that a minority of liars decides nothing."""
    return judgements.nan_to_num(nan=torch.inf, posinf=torch.inf).quantile(0.5, dim=0, interpolation="higher")
