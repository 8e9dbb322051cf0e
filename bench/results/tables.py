"""The tables of docs/research/tiny-models.md: for each its question and the `ftis-node compare` that answers it.

All quick tables together take at most 40 minutes on two idle cores. So the widest have `quick` options, which keep the
control and the main method.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final


@dataclass(frozen=True, slots=True)
class Table:
    """`options` are those of `compare`; `model_seeds` and `seeds` are what the published table was made with.

    `quick` are options that replace those of the same name in the quick table.
    """

    question: str
    options: str
    model_seeds: int = 5
    seeds: int = 1
    quick: str = ""

    @property
    def pairs(self) -> tuple[str, ...]:
        """The pairings that `options` name."""
        words = self.options.split()
        return tuple(value for option, value in pairwise(words) if option == "--pair")

    def num_model_seeds(self, *, quick: bool) -> int:
        """Return the number of starting models of each size."""
        return 1 if quick else self.model_seeds

    def arguments(self, out: str, *, quick: bool) -> list[str]:
        """Return the arguments of `ftis-node`. Quick: only the first seed of the first models."""
        options = [*self.options.split(), *(self.quick.split() if quick else [])]
        seeds = ["--seeds", str(1 if quick else self.seeds)]
        if (number := self.num_model_seeds(quick=quick)) > 1:
            seeds += ["--model-seeds", str(number)]
        return ["compare", *(option.replace(MODELS, f"{out}/models") for option in options), *seeds, "--out", out]


MODELS: Final = "MODELS"  # in options: the folder of the models
RUNS: Final = "bench/results/runs"
UNLIKE: Final = "--pair unlike --speeds 4,2,1,2 --prompts 8 --steps 40 --eval-every 10"

TABLES: Final = {
    "working": Table(
        "What does one peer give at equal own generation, where answers have working?",
        f"--pair sums --run {RUNS}/sums.toml --controls --nodes 2 --prompts 8 --steps 40"
        " --methods ftis,ftis:floor=0.5,f-nois,accepted,gepo,gepo:clip=false",
        quick="--methods ftis",
    ),
    "working-default": Table(
        "And with the default method?",
        f"--pair sums --run {RUNS}/sums-default.toml --prompts 8 --steps 40 --methods alone:own,alone,ftis",
        model_seeds=3,
        quick="--methods alone:own,ftis",
    ),
    "working-seeds": Table(
        "And with other prompts and samples?",
        f"--pair sums --run {RUNS}/sums.toml --prompts 8 --steps 40 --methods alone:own,ftis,accepted",
        model_seeds=3,
        seeds=3,
        quick="--methods ftis",
    ),
    "unlike": Table(
        "And in a swarm of four different models without a barrier?",
        f"{UNLIKE} --run {RUNS}/unlike.toml"
        " --methods alone:own,alone:own:updates=4,alone:own:updates=8,alone,ftis,f-nois,accepted,gepo",
        model_seeds=3,
        quick="--methods alone:own,alone,ftis",
    ),
    "unlike-slow": Table(
        "The same at half the learning rates: does another rate replace peers?",
        f"{UNLIKE} --run {RUNS}/unlike-slow.toml --methods alone:own,alone:own:updates=4,ftis,accepted",
        model_seeds=3,
        quick="--methods alone:own,ftis",
    ),
    "unlike-fast": Table(
        "The same at twice the learning rates: does another rate replace peers?",
        f"{UNLIKE} --run {RUNS}/unlike-fast.toml --methods alone:own,alone:own:updates=4,ftis,accepted",
        model_seeds=3,
        quick="--methods alone:own,ftis",
    ),
    "arithmetic": Table(
        "In such a swarm, where answers have three tokens?",
        f"--pair size --run {RUNS}/arithmetic.toml --controls --nodes 8 --methods ftis,ftis:floor=0.5,f-nois",
        quick="--methods f-nois",
    ),
    "rare": Table(
        "Where each model never finds an answer to half of the problems?",
        f"--pair blind --run {RUNS}/blind.toml --steps 240 --eval-every 20"
        " --methods alone,alone:own,ftis,ftis:floor=0.5,f-nois,accepted,gepo,gepo:clip=false",
        model_seeds=3,
        quick="--methods alone:own,f-nois",
    ),
    "pairs": Table(
        "Which correction is best between experts?",
        "--pair expertise --methods alone,alone:own,alone:own:updates=2,nois,vis,tis,ftis,f-nois,accepted,gepo,"
        "gepo:clip=false",
        model_seeds=3,
        quick="--methods alone,alone:own,nois,ftis,f-nois",
    ),
    "sizes": Table(
        "And between a smaller and a larger model?",
        "--pair size --methods alone,alone:own,alone:own:updates=2,nois,vis,tis,ftis,"
        "ftis:kl_estimator=author_k3:kl_threshold=50,f-nois,accepted,gepo",
        model_seeds=3,
        quick="--methods alone:own,ftis,accepted",
    ),
    "methods": Table(
        "Which of the other methods and options deserves a table with more models?",
        "--pair size --methods alone:own,ftis,accepted,gepo,hacpo,dppo,soft_adaptive,mis,gspo:old_logprobs=learner,"
        "ftis:filter=obrs,ftis:advantage_shift=0.1,ftis:advantage_scale=success,ftis:peer_weights=shrinkage,"
        "f-nois:kl_estimator=k1_fwd:kl_threshold=0.5",
        model_seeds=1,
        quick="--methods alone:own,ftis,hacpo",
    ),
    "other-task": Table(
        "What does a node learn about a task on which the swarm does not train?",
        "--pair size --task arithmetic:add --ood-task arithmetic:sub --methods alone,nois,ftis",
        model_seeds=3,
        quick="--methods alone,ftis",
    ),
    "peft": Table(
        "And between full training and LoRA?",
        "--pair peft --methods alone,alone:own,nois,ftis,f-nois",
        model_seeds=3,
    ),
    "adapter": Table(
        "What does a node with a weak adapter gain from one that trains all weights?",
        f"--pair peft --lora-rank 1 --run {RUNS}/weak-adapter.toml --controls --methods ftis,f-nois",
        model_seeds=3,
    ),
    "late-peer": Table(
        "What are the completions of a peer worth whose weights are 16 steps old?",
        "--pair size --delay none,fixed:16@peer --methods alone,alone:own,tis,ftis,f-nois,gepo",
        model_seeds=3,
        quick="--methods alone,alone:own,ftis,gepo",
    ),
    "filters": Table(
        "Which filter needs no tuning?",
        "--pair size --pair expertise --pair peft"
        " --methods tis,ftis:kl_estimator=rkl_iw:kl_threshold=0.03,ftis:kl_estimator=rkl_iw:kl_threshold=0.3,"
        "ftis:kl_estimator=author_k3:kl_threshold=50,ftis:filter=quantile,ftis:filter=quantile:keep_share=0.1,"
        "ftis:filter=ess",
        quick="--methods ftis:kl_estimator=rkl_iw:kl_threshold=0.03,ftis:filter=quantile:keep_share=0.1",
    ),
    "filters-late": Table(
        "And where weights reach the generators 16 steps late?",
        "--pair size --pair expertise --delay fixed:16"
        " --methods tis,ftis:kl_estimator=rkl_iw:kl_threshold=0.03,ftis:kl_estimator=rkl_iw:kl_threshold=0.3,"
        "ftis:filter=quantile,ftis:filter=quantile:keep_share=0.1,ftis:filter=quantile:keep_share=0.1:rank_own=true,"
        "ftis:filter=ess",
        model_seeds=3,
        quick="--methods ftis:kl_estimator=rkl_iw:kl_threshold=0.03,ftis:filter=quantile:keep_share=0.1,"
        "ftis:filter=quantile:keep_share=0.1:rank_own=true",
    ),
    "delay": Table(
        "What do late weights cost each method, with the same clip and advantages?",
        "--pair expertise --steps 80 --prompts 16 --eval-every 5 --delay none,fixed:8,fixed:64,lognormal:1-64"
        " --methods grpo:advantage_scale=mean,gspo:eps_low=0.2:eps_high=0.2:advantage_scale=mean,"
        "gepo,gepo:alpha=0.1,gepo:clip=false,ftis:advantage_scale=mean,accepted:advantage_scale=mean",
        model_seeds=3,
        quick="--delay none,fixed:64 --methods grpo:advantage_scale=mean,gepo,ftis:advantage_scale=mean",
    ),
    "sapo": Table(
        "Own and foreign groups by the SAPO paper's accounting: every node generates eight groups each round",
        "--pair size --nodes 8 --prompts 8 --eval-every 5 --share sapo:8/0/8,sapo:4/4/8,sapo:2/6/8"
        " --methods swarm_sapo:agg=token_mean,f-nois:agg=token_mean",
        model_seeds=3,
        quick="--share sapo:8/0/8,sapo:4/4/8 --methods f-nois:agg=token_mean",
    ),
    "sapo-scarce": Table(
        "And where most own groups have no signal?",
        f"--pair size --run {RUNS}/scarce.toml --nodes 8 --prompts 8 --steps 60"
        " --share sapo:8/0/8,sapo:4/4/8,sapo:2/6/8 --methods swarm_sapo:agg=token_mean,f-nois:agg=token_mean",
        model_seeds=3,
        quick="--share sapo:8/0/8,sapo:4/4/8 --methods f-nois:agg=token_mean",
    ),
    "experts": Table(
        "Experts of different domains at equal compute",
        f"--pair hdee --run {RUNS}/experts.toml --steps 24",
        model_seeds=3,
    ),
    "guess": Table(
        "What does a peer give in a game of several turns?",
        "--pair guess --steps 60 --prompts 8 --eval-every 10 --methods alone:own,ftis",
        model_seeds=6,
    ),
    "codecs": Table(
        "What do log-probs at half precision cost?",
        "--pair size --codec exact,lossy --methods ftis,nois",
        model_seeds=3,
        quick="--methods ftis",
    ),
    "attacks": Table(
        "What does an attacker do who inverts rewards, or reports log-probs that look close or far?",
        "--pair size --nodes 4 --attack none,rewards,logprobs,positives --methods ftis",
        model_seeds=3,
        quick="--attack none,positives",
    ),
    "attackers": Table(
        "What does an attacker do whose log-probs look honest: small, or those of a learner?",
        "--pair size --nodes 4 --attack none,padded,mimic"
        " --methods ftis,ftis:floor=0.5,f-nois,accepted,ftis:peer_weights=agreement",
        model_seeds=3,
        quick="--attack none,padded --methods ftis",
    ),
}

# Of `make results-llm`: language models, and hours for each seed.
LLM_TABLES: Final = {
    "llm-size": Table(
        "What does a language model gain from one with a third of its layers cut, and the other way round?",
        f"--pair {MODELS}/whole-{{seed}},{MODELS}/cut-{{seed}} --run {RUNS}/words.toml --prompts 8 --steps 30"
        " --methods alone:own,ftis,accepted,gepo,nois,ftis:advantage_scale=success,alone,alone:own:updates=2",
        model_seeds=3,
        quick="--methods alone,alone:own,ftis",
    ),
    "llm-same": Table(
        "And from its own copy, which gives it more data and no other model?",
        f"--pair {MODELS}/whole-{{seed}},{MODELS}/whole-{{seed}} --run {RUNS}/words.toml --prompts 8 --steps 30"
        " --methods ftis",
        model_seeds=3,
    ),
}
