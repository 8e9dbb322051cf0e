"""One training step, exact for every method although the batch does not fit in memory at once.

A loss depends on the model only through the log-probs lp, a small matrix. So each micro-batch computes lp, dL/dlp, and
lp.backward(dL/dlp). If a completion's part of dL/dlp depends on its own log-probs alone (`Objective.separates`: nearly
all methods), one forward and one backward pass suffice. Other losses need a pass without gradient for the whole matrix
first. Parts of dL/dlp that are zero (filtered, or no advantage) cost no backward pass.

On a GPU the host queues all passes without a wait. The loss is computed there, and flags of values that are not finite
are read once, at the end. Which tokens may have a gradient is then known only by their advantages, so tokens that a
filter removes cost a backward pass.

If the log-probs show that a group is understated, its other completions may already be in the gradient. The passes are
then repeated without that group.

A step is applied, *skipped* or *refused*. It is skipped if no token has a gradient, because an Adam step would still
move the weights by its momentum. It is refused if a value is not finite. In both cases weights and optimizer are
unchanged.

A step that runs out of memory is repeated with less memory (`OomRetry`), instead of ending the learner.

    activations are kept --> they are recomputed (a third more time) --> smaller micro-batches

Before its first update a step has changed nothing and can start over. The results are equal up to rounding. Each lack
of memory halves the budget of a micro-batch until the next start.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ftis_node.errors import MachineError, WorkerTaskError, says_out_of_memory
from ftis_node.learner.batch import MicroBatch, TrainBatch, is_free_to_read, on_device
from ftis_node.learner.distributed.ranks import ALONE, Ranks, StepCallback
from ftis_node.learner.distributed.sharded_tensors import whole
from ftis_node.learner.step.batch_loss import LOSS, BatchLoss, Flags, marked
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.optimizer import MAX_GRADIENT_NORM

Outcome = TypeVar("Outcome")
log = logging.getLogger(__name__)

Forward: TypeAlias = "Callable[[MicroBatch], Tensor]"  # log-probs [M] of a micro-batch's completion tokens
CPU = torch.device("cpu")
LOGPROB, SIGNAL = "a learner log-prob", "a gradient that is not 0"


@dataclass(frozen=True, slots=True)
class Gradients:
    """The result of the passes over the batch. `skipped` or `refused` is the reason why no gradient can be applied.

    `learner_logprobs` is `[N, T]` float32 on the CPU, detached; `grad_norm` is the norm before clipping.
    """

    learner_logprobs: Tensor
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    skipped: str | None = None
    refused: str | None = None

    @property
    def is_usable(self) -> bool:
        return self.skipped is None and self.refused is None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one or more updates on one batch. `first` is the result of the first update's passes.

    With `num_updates` > 0, `skipped` and `refused` are of a later update. `ran_out`: memory ran out in it.
    """

    first: Gradients
    num_updates: int
    skipped: str | None
    refused: str | None
    ran_out: bool = False


class _NotFinite(Exception):
    """Raised with the name of a value that is not finite."""


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a model over one batch, whose `micro_batches` are divided among `ranks`.

    `forward` returns log-probs on `device`. `between` is called around each pass, and may raise WorkerTaskError.
    """

    forward: Forward
    batch: TrainBatch
    micro_batches: Sequence[MicroBatch]
    device: torch.device = CPU
    between: StepCallback = lambda: None
    ranks: Ranks = ALONE

    def logprobs(self) -> Tensor:
        """Return the log-probs `[N, T]`, float32 on the CPU, 0 outside the mask, without gradient."""
        logprobs = torch.zeros_like(self.batch.behaviour_logprobs, device=self.device)
        self._fill(logprobs)
        return logprobs.cpu()

    def gradients(
        self,
        objective: Objective,
        *,
        first_pass: Tensor | None = None,
        reference: Tensor | None = None,
        excluded: Tensor | None = None,
    ) -> Gradients:
        """Add dL/dweights to the `.grad` of what `forward` depends on. Options are as in `Objective.loss`.

        If the result is not usable, the gradients may be anything.
        """
        batch, ranks = self.batch, self.ranks
        found, flags = batch.behaviour_logprobs.clone(), Flags(CPU)
        flags.check(batch.rewards, "a reward")
        flags.check(batch.behaviour_logprobs, "a behaviour log-prob")
        flags.check(batch.behaviour_means, "a behaviour log-prob")
        try:
            _refuse(flags)
            flags = Flags(self.device)
            loss_of = BatchLoss(objective, batch, objective.advantages(batch), first_pass, reference, excluded, flags)
            is_one_pass = objective.separates(batch) or len(self.micro_batches) == 1
            logprobs = found.to(self.device, copy=True)
            for output, share in (self._one_pass if is_one_pass else self._two_passes)(logprobs, loss_of):
                self.between()
                torch.autograd.backward(output, share)
            found = logprobs.cpu()
            with ranks.agreed(_NotFinite):
                has_signal = SIGNAL in _refuse(flags)
            has_signal = ranks.any_rank(has_signal)
            ranks.fill_in(found, self.micro_batches)
            with torch.no_grad():
                loss, metrics = loss_of(found.to(self.device))
            flags.check(loss, LOSS)
            _refuse(flags)
        except _NotFinite as error:
            return Gradients(found, refused=str(error))
        return Gradients(found, loss=loss.item(), metrics=metrics, skipped=None if has_signal else "no signal")

    def _one_pass(self, logprobs: Tensor, loss_of: BatchLoss) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each micro-batch's log-probs with their graph, and their dL/dlp `[M]`. Fills `logprobs` `[N, T]`.

        Cells not yet computed hold finite behaviour log-probs, which do not affect a separable loss.
        """
        for micro_batch in self.ranks.deal(loss_of.mark(self.micro_batches)):
            self.between()
            output = self.forward(micro_batch)
            loss_of.flags.check(output, LOGPROB)
            _put(logprobs, micro_batch, output)
            if self.batch.is_text.any():  # their loss, on the CPU, raises ValueError
                with self.ranks.agreed(_NotFinite):
                    _refuse(loss_of.flags)
            share = loss_of.gradient_in(micro_batch, logprobs)
            is_any = share.any()
            loss_of.flags.note(SIGNAL, is_any)
            if self.ranks.any_rank(bool(is_any) if is_free_to_read(share.device) else _may_train(micro_batch)):
                yield output, share

    def _two_passes(self, logprobs: Tensor, loss_of: BatchLoss) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield as `_one_pass` does, for a loss that couples completions."""
        self._fill(logprobs)
        loss_of.flags.check(logprobs, LOGPROB)
        _refuse(loss_of.flags)
        gradient = loss_of.gradient(logprobs)
        loss_of.flags.note(SIGNAL, gradient.any())
        gradient = gradient.cpu()
        for micro_batch in self.ranks.deal(list(filter(_may_train, marked(self.micro_batches, gradient != 0)))):
            self.between()
            share = gradient.view(-1)[micro_batch.cell_index]
            yield self.forward(micro_batch), on_device(share, logprobs.device)

    @torch.no_grad()
    def _fill(self, logprobs: Tensor) -> None:
        """Copy the log-probs of all micro-batches, on all ranks, to `logprobs` `[N, T]`."""
        for micro_batch in self.ranks.deal(self.micro_batches):
            self.between()
            _put(logprobs, micro_batch, self.forward(micro_batch))
        if self.ranks.size > 1:
            found = logprobs.cpu()
            self.ranks.fill_in(found, self.micro_batches)
            logprobs.copy_(found)


def _may_train(micro_batch: MicroBatch) -> bool:
    return micro_batch.trained is not None and len(micro_batch.trained) > 0


def _refuse(flags: Flags) -> list[str]:
    """Return the flags that are set. Raises _NotFinite if one of them means a refusal."""
    found = flags.read()
    for name in found:
        if name != SIGNAL:
            raise _NotFinite(f"{name} is not finite")
    return found


def _put(logprobs: Tensor, micro_batch: MicroBatch, output: Tensor) -> None:
    """Copy log-probs `[M]` of a micro-batch to their cells in `logprobs` `[N, T]`."""
    logprobs.view(-1)[on_device(micro_batch.cell_index, logprobs.device)] = output.detach().to(logprobs)


def take_step(
    passes: Passes,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float,
    updates: int = 1,
    reference: Tensor | None = None,
    before_update: Callable[[], None] = lambda: None,
) -> StepOutcome:
    """Do `updates` optimizer steps on one batch. Stops at the first that is skipped or refused.

    `before_update` is called just before the first update changes the weights. An error until then leaves weights and
    optimizer unchanged. After it, a stop or a lack of memory ends the step with fewer updates.
    """
    batch = passes.batch

    def update(first_pass: Tensor | None) -> Gradients:
        with one_out_of_memory_error():
            excluded = None if first_pass is None else objective.excluded(first_pass, batch)
            gradients = passes.gradients(objective, first_pass=first_pass, reference=reference, excluded=excluded)
            if excluded is None and gradients.is_usable:
                excluded = objective.excluded(gradients.learner_logprobs, batch)
                if excluded.any():
                    optimizer.zero_grad(set_to_none=True)
                    gradients = passes.gradients(objective, reference=reference, excluded=excluded)
            passes.between()
            if first_pass is None:
                before_update()
            return _apply(gradients, optimizer, max_grad_norm)

    ran_out = False
    try:
        first = last = update(None)
        num_updates = int(first.is_usable)
        while last.is_usable and num_updates < updates:
            try:
                last = update(first.learner_logprobs)
            except (WorkerTaskError, torch.OutOfMemoryError) as error:
                if passes.ranks.size > 1 and isinstance(error, torch.OutOfMemoryError):
                    raise  # the other ranks do not know about it
                ran_out = isinstance(error, torch.OutOfMemoryError)
                last = replace(first, refused=f"update {num_updates + 1} of {updates} was not done: {error}")
            num_updates += int(last.is_usable)
    finally:
        optimizer.zero_grad(set_to_none=True)
    return StepOutcome(first, num_updates, skipped=last.skipped, refused=last.refused, ran_out=ran_out)


def _apply(gradients: Gradients, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Gradients:
    """Clip and step if there is something to apply. Returns `gradients` with the norm, or the reason for a refusal."""
    if not gradients.is_usable:
        return gradients
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = whole(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)).item()
    if not norm <= MAX_GRADIENT_NORM:
        return replace(gradients, refused="the gradient is not finite")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return replace(gradients, grad_norm=norm)


@contextmanager
def one_out_of_memory_error() -> Iterator[None]:
    """Raise torch.OutOfMemoryError for any library's lack of memory inside."""
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError(str(error) or "out of memory") from error
    except RuntimeError as error:
        if says_out_of_memory(str(error)):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


class OomRetry:
    """The budget of a learner's micro-batches in tokens, and the number of out-of-memory errors of the newest step.

    `recompute` enables activation recomputation, and returns whether it was off until now.
    """

    def __init__(self, max_tokens: int, *, recompute: Callable[[], bool] = lambda: False) -> None:
        self.max_tokens = max_tokens
        self.num_out_of_memory = 0
        self._recompute = recompute

    def run(self, attempt: Callable[[], Outcome], *, step: int, whole: int, longest: int) -> Outcome:
        """Return the outcome of `attempt`, repeated with less memory while it runs out of memory.

        The batch has `whole` tokens, its longest sequence `longest`. Raises MachineError if that alone is too much.
        """
        self.num_out_of_memory = 0
        while True:
            try:
                with one_out_of_memory_error():
                    return attempt()
            except torch.OutOfMemoryError as error:
                reason = str(error)  # the text only: the error's traceback holds the step's tensors
            if not self.note_out_of_memory(step=step, whole=whole, longest=longest):
                raise MachineError(
                    f"step {step} does not fit in memory with one sequence of {longest} tokens: set "
                    "learner.recompute_activations = true or learner.optimizer_states = '8bit', or train an adapter "
                    f"(--lora) ({reason.splitlines()[0]})"
                )

    def note_out_of_memory(self, *, step: int, whole: int, longest: int) -> bool:
        """Free memory, and use recomputation or a smaller budget from now on. Returns False if neither is left."""
        self.num_out_of_memory += 1
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._recompute():
            log.warning(
                "step %d ran out of memory: activations are recomputed from now on, which takes a third more time",
                step,
            )
            return True
        in_use = max(min(self.max_tokens, whole), longest)
        if in_use <= longest:  # a sequence is never divided
            return False
        self.max_tokens = max(in_use // 2, longest)
        log.warning(
            "step %d ran out of memory with micro-batches of %d tokens: %d from now on", step, in_use, self.max_tokens
        )
        return True
