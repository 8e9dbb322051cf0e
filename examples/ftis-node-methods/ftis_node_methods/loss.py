"""The loss `balance`: the weight is the ratio to the mixture of both generators, rho0 / (1 - a + a rho0).

a is the share of own completions in the batch (balance heuristic, Veach and Guibas 1995). The weight is smooth, and at
most 1 / a. Without own completions it is rho0. Always at most `cap`.
"""

from torch import Tensor

from ftis_node.algorithms.batch import Batch
from ftis_node.algorithms.importance_weights import first_pass_ratio, truncated
from ftis_node.algorithms.methods import Method, unweighted
from ftis_node.algorithms.settings import Settings


def balance_weight(batch: Batch, settings: Settings) -> Tensor:
    share, ratio = batch.is_own.double().mean(), first_pass_ratio(batch)
    return truncated(ratio / (1 - share + share * ratio), settings.cap) * unweighted(batch, settings)


BALANCE = Method(
    objective=balance_weight,
    source="this example",
    takes=("sender_ids",),
    separable=False,  # a is the share of the whole batch
    defaults={"cap": 20.0},
)
