"""Adam, with its two moments of each weight in one of three forms (`learner.optimizer_states`).

    float32   beside the masters, 8 bytes a weight: torch's fused AdamW
    8bit      beside the masters, 2 bytes a weight and two scales for each block of 256: bitsandbytes' AdamW8bit
              (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861). Tensors of fewer than
              4,096 elements keep float32 moments
    offload   8 bytes a weight of host memory, beside masters and gradients that lie there too: fused AdamW on the CPU

Moments are allocated at the start, so a step that runs out of memory has applied nothing. Without weight decay, the
default, AdamW is the paper's Adam.

Weights that the model computes with in another number format, or on another device, have float32 masters (Micikevicius
et al., Mixed Precision Training, arXiv 1710.03740):

    model's weight (bfloat16) --forward, backward--> gradient (bfloat16) --added up--> master's gradient (float32)
             ^                                                                               |
             +------------------ rounded ------------------ master (float32) <--optimizer----+

At a learning rate of 1e-6 an update is below the resolution of bfloat16 for most weights: rounding would remove it
every time. A gradient is added to its master's as soon as the backward pass has finished it, and is freed in the model.
If masters are in host memory, each gradient, and each weight on its way back, passes through one pinned buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ftis_node.errors import ConfigError, MachineError, how_to_install
from ftis_node.learner.distributed.sharded_tensors import part_like
from ftis_node.learner.messages import LearnerBoot
from ftis_node.models import pick_device

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
LOOK_UP_TABLES = ("qmap1", "qmap2")  # the values of 8-bit codes: always the same for all tensors
# Norm of a gradient in float32: the second moment holds its square. An update is at most lr / (1 - beta1) * |m| / eps
# (arXiv 1412.6980, section 2.1), which stays finite.
MAX_GRADIENT_NORM = 1e18


class MasterWeights:
    """`tensors` are the float32 masters of a model's trainable weights, by name. The optimizer updates them."""

    def __init__(self, weights: Mapping[str, Parameter], *, home: torch.device | None = None):
        """Create masters of the present `weights`, on the device `home`; None: on each weight's device."""
        self.tensors = {name: _master_of(weight, home or weight.device) for name, weight in weights.items()}
        pairs = zip(weights.values(), self.tensors.values(), strict=True)
        self._followers = [(weight, master) for weight, master in pairs if weight is not master]
        self._buffer: Tensor | None = None
        for weight, master in self._followers:
            hook = partial(self._take_gradient, master)
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters to the model's weights, rounded to their number format."""
        beside = [pair for pair in self._followers if pair[0].device == pair[1].device]
        if beside:  # one call: hundreds of copies take the host longer than a GPU
            torch._foreach_copy_([weight for weight, _ in beside], [master for _, master in beside])
        for weight, master in self._followers:
            if weight.device != master.device:
                weight.copy_(self._staged(weight).copy_(master))

    @torch.no_grad()
    def _take_gradient(self, master: Parameter, weight: Parameter) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None, "called after a gradient was accumulated"
        if gradient.device != master.device:
            gradient = self._staged(gradient).copy_(gradient)
        if master.grad is None:
            master.grad = gradient.to(torch.float32, copy=True)
        else:
            master.grad.add_(gradient)

    def _staged(self, like: Tensor) -> Tensor:
        """Return a part of the pinned buffer, shaped as `like`. The buffer has the size of the largest weight."""
        if self._buffer is None:
            num_bytes = max(weight.nbytes for weight, _ in self._followers)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer[: like.nbytes].view(like.dtype).view(like.shape)


def _master_of(weight: Parameter, home: torch.device) -> Parameter:
    if weight.dtype == torch.float32 and weight.device == home:
        return weight
    return Parameter(weight.detach().to(home, torch.float32))


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
    return MasterWeights(weights, home=torch.device("cpu") if boot.settings.optimizer_states == "offload" else None)


def make_optimizer(masters: MasterWeights, boot: LearnerBoot) -> torch.optim.Optimizer:
    """Return AdamW over `masters` with the boot's settings and zero moments. Its steps also update the weights."""
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
    optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor], moments: Iterable[tuple[str, Tensor]]
) -> None:
    """Restore what `moments_of` returned from an optimizer of the same form."""
    for key, value in moments:
        name, _, moment = key.rpartition(".")
        state = optimizer.state[masters[name]]
        if isinstance(state[moment], torch.Tensor):
            state[moment].copy_(part_like(state[moment], value))
        else:
            state[moment] = int(value)


def _adam(parameters: list[Parameter], boot: LearnerBoot) -> torch.optim.Optimizer:
    how: dict[str, Any] = {
        "lr": boot.peak_learning_rate,
        "betas": ADAM_BETAS,
        "eps": ADAM_EPS,
        "weight_decay": 0.0,  # GRPO has none; the learning rates are so low that it would hardly act
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
            f"8-bit optimizer states need bitsandbytes: {how_to_install('8bit')}, or set "
            "learner.optimizer_states = 'float32'"
        ) from error
    return bitsandbytes
