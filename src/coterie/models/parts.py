"""What several networks are made of."""

import math
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

Width = Annotated[int, Field(gt=0, le=10**6)]
Normalisation = Literal["none", "batch", "group"]


def normalising(kind: Normalisation, channels: int) -> list[nn.Module]:
    """What follows a convolution with so many channels: nothing, batch normalisation (DESIGN.md says what becomes of
    its statistics), or normalisation in 32 groups (Wu and He 2018), fewer where a group had less than 4 channels."""
    if kind == "none":
        return []
    groups = math.gcd(32, channels, max(1, channels // 4))
    return [nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(groups, channels)]
