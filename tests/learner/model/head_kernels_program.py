"""Prints the errors of the output head's Triton kernels, run by Triton's interpreter on the CPU."""

import json
import sys

import torch

from ftis_node.learner.model import head_kernels, logprobs
from ftis_node.learner.model.logprobs import LogitsProcessing, chosen_and_log_sum, logits_gradient

head_kernels.BLOCK = 64  # so that rows have several blocks


def both(function):
    """Return the results of the operations and of the kernels."""
    results = []
    for devices in ((), ("cpu",)):
        logprobs.FUSED_DEVICES = devices
        results.append(function())
    return results


def errors(width: int, factor: float, dtype: torch.dtype, scale: float) -> dict[str, float]:
    """Return the largest errors at 5 rows, one of them without a gradient."""
    generator = torch.Generator().manual_seed(width)
    logits = scale * torch.randn(5, width, generator=generator)
    ids = torch.randint(0, width, (5,), generator=generator)
    ids[1] = width - 1
    processing = LogitsProcessing(temperature=1 / factor)
    (chosen, log_sum), (fused_chosen, fused_log_sum) = both(lambda: chosen_and_log_sum(logits.clone(), ids, processing))
    share = torch.tensor([0.3, -1.5, 0.0, 1e-3, 2.0])
    expected, found = both(lambda: logits_gradient(logits.clone(), ids, log_sum, share, processing, dtype))
    exact = torch.log_softmax(logits.double() * factor, -1).gather(1, ids[:, None])[:, 0]
    difference = (found.float() - expected.float()).abs()
    return {
        "chosen": float((fused_chosen - chosen).abs().max()),
        "log_prob": float((fused_chosen - fused_log_sum - exact).abs().max() / max(1.0, scale)),
        "gradient": float((difference / expected.float().abs().clamp(min=1e-6)).max())
        if dtype != torch.float32
        else float(difference.max()),
        "wrong_zeros": int(((found == 0).all(dim=1) != (share == 0)).sum()),
        "wrong_signs": int(
            ((found.sign() == share.sign()[:, None]) != (torch.arange(width) == ids[:, None]))[share != 0].sum()
        ),
        "dtype": int(found.dtype != dtype),
    }


def trials() -> list[str]:
    """Return the trial's complaint, "" for none: of the kernels, then of wrong ones."""
    found = []
    for gradient in (head_kernels.logits_gradient, lambda logits, *_: logits):
        head_kernels.logits_gradient = gradient
        try:
            head_kernels.check(torch.device("cpu"))
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def head_difference() -> float:
    """Return the largest difference of log-probs and gradients of a whole head, of which some tokens are trained."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(40, 16, generator=generator), torch.randn(200, 16, generator=generator)
    ids, trained = torch.randint(0, 200, (40,), generator=generator), torch.arange(3, 30)
    gradient = torch.zeros(40).index_fill(0, trained[::2], 0.7)
    head = torch.nn.Linear(16, 200, bias=False)
    head.weight.data = weight

    def run() -> torch.Tensor:
        leaf = hidden.clone().requires_grad_()
        head.zero_grad()
        how = {"processing": LogitsProcessing(), "chunk_tokens": 7, "trained": trained}
        values = logprobs.head_logprobs(head, leaf, ids, **how)
        values.backward(gradient)
        return torch.cat([values.detach(), leaf.grad.flatten(), head.weight.grad.flatten()])

    expected, _ = both(run)
    logprobs.is_free_to_read = lambda device: False  # as on a GPU, where only `trained` is known
    return max(float((found - expected).abs().max()) for found in both(run))


def main() -> None:
    cases = [(37, 1.0, torch.float32, 3.0), (64, 0.7, torch.float32, 3.0), (1000, 1.0, torch.bfloat16, 3.0)]
    cases.append((321, 1.0, torch.float32, 200.0))  # exponentials that would overflow
    found = [errors(*case) for case in cases]
    sys.stdout.write(json.dumps({"cases": found, "head": head_difference(), "trials": trials()}))


if __name__ == "__main__":
    main()
