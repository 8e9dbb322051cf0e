"""The method `sqrt_tis`: the importance weight is the square root of the ratio. The filter `good`: drops A < 0."""

from torch import Tensor

from ftis_node.algorithms.batch import Batch
from ftis_node.algorithms.importance_weights import first_pass_ratio, truncated
from ftis_node.algorithms.methods import Method, unweighted
from ftis_node.algorithms.settings import Settings


def square_root_weight(batch: Batch, settings: Settings) -> Tensor:
    return truncated(first_pass_ratio(batch).sqrt(), settings.cap) * unweighted(batch, settings)


def good(batch: Batch, settings: Settings) -> Tensor:
    return batch.advantages >= 0


SQRT_TIS = Method(objective=square_root_weight, source="this example", defaults={"cap": 3.0})
