"""An independent reference of advantages: plain Python floats and loops, from the formulas."""

import math


def capability_ratio(rewards: list[float], senders: list[int], sender: int) -> float:
    """Return HACPO's P_own / P_sender, from the rates of positive rewards, each at least 1e-8, within [0.1, 10]."""

    def rate(of: int) -> float:
        mine = [reward for reward, other in zip(rewards, senders, strict=True) if other == of]
        return max(1e-8, sum(reward > 0 for reward in mine) / len(mine))

    if sender == 0 or 0 not in senders:
        return 1.0
    return max(0.1, min(10.0, rate(0) / rate(sender)))


def capability_baseline(rewards: list[float], senders: list[int], members: list[int]) -> float:
    """Return HACPO's mean of omega r over a group; if above 1, the mean of the own rewards, or that of the group."""
    values = [capability_ratio(rewards, senders, senders[i]) * rewards[i] for i in members]
    baseline = math.fsum(values) / len(members)
    if baseline <= 1:
        return baseline
    trusted = [i for i in members if senders[i] == 0] or members
    return math.fsum(rewards[i] for i in trusted) / len(trusted)


def reference_advantages(
    rewards: list[float],
    group_ids: list[int],
    scale: str,
    eps: float,
    senders: list[int] | None = None,
    shift: float = 0.0,
) -> list[float]:
    senders = senders or [0] * len(rewards)
    advantages = []
    for reward, group, sender in zip(rewards, group_ids, senders, strict=True):
        members = [i for i, other in enumerate(group_ids) if other == group]
        values = [rewards[i] for i in members]
        mean = math.fsum(values) / len(values)
        if len(set(values)) == 1:
            advantages.append(0.0)
            continue
        baseline = capability_baseline(rewards, senders, members) if scale == "capability" else mean
        above = reward - baseline
        shifted = above + (shift if sender != 0 else 0.0)
        above = shifted if above > 0 else min(0.0, shifted)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
        unit = {"mean": 1.0, "success": mean + eps}.get(scale, deviation + eps)
        bound = {"mean": math.inf, "success": len(values)}.get(scale, math.sqrt(len(values)))
        omega = capability_ratio(rewards, senders, sender) if scale == "capability" else 1.0
        advantages.append(max(-bound, min(bound, above / unit)) / omega)
    return advantages


def learner_advantages(
    rewards: list[float], groups: list[int], senders: list[int], tasks: list[int], ratios: list[float]
) -> list[float]:
    """Return the advantages of the example plug-in `learner`."""
    usual = reference_advantages(rewards, groups, "std", 1e-8)
    advantages = []
    for number, reward in enumerate(rewards):
        own = [rewards[i] for i in range(len(rewards)) if senders[i] == 0 and tasks[i] == tasks[number]]
        members = [i for i in range(len(rewards)) if groups[i] == groups[number]]
        if senders[number] == 0 or not own:
            advantages.append(usual[number])
            continue
        trust = {i: min(ratios[i], 1.0) for i in members}
        known = 4 * math.fsum(own) / len(own) + math.fsum(trust[i] * rewards[i] for i in members)
        baseline = known / (4 + math.fsum(trust.values()))
        mean = math.fsum(rewards[i] for i in members) / len(members)
        squares = math.fsum((rewards[i] - mean) ** 2 for i in members)
        deviation = math.sqrt(squares / max(1, len(members) - 1))
        advantages.append((reward - baseline) / max(deviation, 0.25))
    return advantages
