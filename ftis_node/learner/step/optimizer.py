"""Adam, with its two moments of each weight in one of three forms (`learner.optimizer_states`).

    float32   beside the masters, 8 bytes a weight: torch's fused AdamW
    8bit      beside the masters, 2 bytes a weight and two scales for each block of 256: bitsandbytes' AdamW8bit
              (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861). Tensors of fewer than
              4,096 elements keep float32 moments
    offload   8 bytes a weight of host memory, beside masters and gradients that lie there too: fused AdamW on the CPU

Moments are allocated at the start, as zeros, not in the first step. So a lack of memory for them shows at the start,
and a step that runs out of memory has applied nothing. Without weight decay, the default, AdamW is the paper's Adam.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from ftis_node.errors import ConfigError, MachineError
from ftis_node.learner.distributed.sharded_tensors import part_like
from ftis_node.learner.step.masters import MasterWeights
from ftis_node.models import pick_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.nn import Parameter

    from ftis_node.learner.messages import LearnerBoot

BLOCK_SIZE = 256  # elements that share a scale; fixed in bitsandbytes
LOOK_UP_TABLES = ("qmap1", "qmap2")  # the values of 8-bit codes: always the same for all tensors


def check_optimizer_states(boot: LearnerBoot) -> None:
    """Raise MachineError if the configured form lacks a package, ConfigError if it does not apply here."""
    if boot.settings.optimizer_states != "float32" and boot.settings.num_ranks > 1:
        raise ConfigError(
            f"learner.optimizer_states = '{boot.settings.optimizer_states}' is for a learner of one process: use "
            "'float32', which several divide among them"
        )
    if boot.settings.optimizer_states == "8bit":
        _bitsandbytes()
    if boot.settings.optimizer_states == "offload" and pick_device(boot.device) == "cpu":
        raise ConfigError(
            "learner.optimizer_states = 'offload' moves memory from a GPU to the host: without a GPU use 'float32' or "
            "'8bit'"
        )


def make_masters(weights: Mapping[str, Parameter], boot: LearnerBoot) -> MasterWeights:
    """Return the masters of a policy's trainable weights, on the device that the optimizer's form needs."""
    return MasterWeights(weights, home=torch.device("cpu") if boot.settings.optimizer_states == "offload" else None)


def make_optimizer(masters: MasterWeights, boot: LearnerBoot) -> torch.optim.Optimizer:
    """Return AdamW over `masters` with the boot's settings and zero moments. Each of its steps also updates the
    weights.
    """
    optimizer = _adam(list(masters.tensors.values()), boot)
    optimizer.register_step_post_hook(lambda *_: masters.write_back())
    return optimizer


def moments_of(optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state of each master, as plain tensors named `<master>.<moment>`."""
    return {
        f"{name}.{moment}": torch.as_tensor(value)
        for name, master in masters.items()
        for moment, value in optimizer.state[master].items()
        if moment not in LOOK_UP_TABLES
    }


@torch.no_grad()
def restore_moments(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Restore the result of `moments_of`. Raises ConfigError for moments of another form."""
    for key, value in moments.items():
        name, _, moment = key.rpartition(".")
        state = optimizer.state[masters[name]]
        present = state.get(moment)
        if isinstance(present, torch.Tensor) and present.dtype == value.dtype:
            present.copy_(part_like(present, value))
        elif isinstance(present, int):
            state[moment] = int(value)
        else:
            raise ConfigError(
                "the checkpoint's optimiser states have another form: set learner.optimizer_states to '8bit' if they "
                "were, else to 'float32', as before"
            )


def moment_shapes(shape: torch.Size) -> tuple[torch.Size, ...]:
    """Return the valid shapes of an entry of `moments_of` for a master of `shape`: its own, a count, or scales."""
    return shape, torch.Size([]), torch.Size([ceil(shape.numel() / BLOCK_SIZE)])


def _adam(parameters: list[Parameter], boot: LearnerBoot) -> torch.optim.Optimizer:
    how: dict[str, Any] = {
        "lr": boot.peak_learning_rate,
        "betas": boot.optimizer.betas,
        "eps": boot.optimizer.eps,
        "weight_decay": boot.optimizer.weight_decay,
    }
    if boot.settings.optimizer_states == "8bit":
        small: Any = _bitsandbytes().optim.AdamW8bit(parameters, **how)
        for number, parameter in enumerate(parameters):
            small.init_state(small.param_groups[0], parameter, 0, number)
        return small  # type: ignore[no-any-return]
    optimizer = torch.optim.AdamW(parameters, fused=True, **how)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MachineError(
            "8-bit optimizer states need bitsandbytes: pip install 'ftis-node[8bit]', or set "
            "learner.optimizer_states = 'float32'"
        ) from error
    return bitsandbytes
