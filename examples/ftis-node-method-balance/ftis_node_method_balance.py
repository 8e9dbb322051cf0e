"""The method `balance` and the filter `window`: two ideas beyond the papers, to be refuted by `compare`.

balance: the weight rho0 / (1 - a + a rho0), with a the share of own completions in the batch. It is the ratio to the
mixture of both generators (the balance heuristic, Veach and Guibas 1995). Its bound is 1 / a, 2 for equal shares, and
it is smooth. Without own completions it is rho0, truncated at the cap.

window: a completion with A < 0 is dropped if the mean KL of any 32 consecutive tokens reaches `kl_threshold`. A mean
over the completion hides a short foreign part, the more the longer the completion is. Shorter ones are one window.
"""

import torch
from torch import Tensor

from ftis_node.algorithms.batch import Batch
from ftis_node.algorithms.filters import keep_near_or_good, token_kl
from ftis_node.algorithms.importance_weights import first_pass_ratio, truncated
from ftis_node.algorithms.methods import Method, unweighted
from ftis_node.algorithms.settings import Settings

WINDOW = 32


def balance_weight(batch: Batch, settings: Settings) -> Tensor:
    share, ratio = batch.is_own.double().mean(), first_pass_ratio(batch)
    return truncated(ratio / (1 - share + share * ratio), settings.cap) * unweighted(batch, settings)


def window(batch: Batch, settings: Settings) -> Tensor:
    values = torch.where(batch.mask, token_kl(batch, settings.kl_estimator), 0.0)
    places = batch.mask.cumsum(dim=1)  # 1 for the first token; a mask may have gaps
    sums = values.new_zeros(len(values), values.shape[1] + 1).scatter_add(1, places, values).cumsum(dim=1)
    ends = torch.arange(sums.shape[1], device=sums.device)
    length, width = batch.num_tokens[:, None], batch.num_tokens.clamp(1, WINDOW)[:, None]
    means = (sums - sums[:, (ends - WINDOW).clamp(min=0)]) / width
    largest = torch.where((ends >= width) & (ends <= length), means, -torch.inf).amax(dim=1)
    return keep_near_or_good(batch.advantages, largest, settings.kl_threshold)


BALANCE = Method(
    objective=balance_weight,
    source="this example",
    takes=("sender_ids",),
    separable=False,  # a is the share of the whole batch
    defaults={"cap": 20.0},
)
