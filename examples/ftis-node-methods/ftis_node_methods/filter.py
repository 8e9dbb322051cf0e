"""The filter `window`: drops a completion with A < 0 if the mean KL of any 32 consecutive tokens reaches g.

A mean over the whole completion hides a short foreign part, the more the longer it is. g is `kl_threshold`.
"""

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch
from ftis_node.algorithms.filters import keep_near_or_good, token_kl
from ftis_node.algorithms.settings import Settings

WINDOW = 32  # tokens; a shorter completion is one window


def window(batch: Batch, settings: Settings) -> Tensor:
    values = torch.where(batch.mask, token_kl(batch, settings.kl_estimator), 0.0)
    places = batch.mask.cumsum(dim=1)  # 1 for the first token; a mask may have gaps
    sums = values.new_zeros(len(values), values.shape[1] + 1).scatter_add(1, places, values).cumsum(dim=1)
    ends = torch.arange(sums.shape[1], device=sums.device)
    length, width = batch.num_tokens[:, None], batch.num_tokens.clamp(1, WINDOW)[:, None]
    means = (sums - sums[:, (ends - WINDOW).clamp(min=0)]) / width
    largest = torch.where((ends >= width) & (ends <= length), means, -torch.inf).amax(dim=1)
    return keep_near_or_good(batch.advantages, largest, settings.kl_threshold)
