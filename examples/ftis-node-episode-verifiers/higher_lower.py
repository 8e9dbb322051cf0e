"""An environment of verifiers 0.4 with turns: guess a number from 1 to 20 by the answers `higher` and `lower`."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["HigherLowerTaskset"]


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    pass


class HigherLowerTaskset(vf.Taskset[NumberTask]):
    def load(self) -> Iterator[NumberTask]:
        for seed in range(200):
            number = random.Random(seed).randint(1, 20)
            yield NumberTask(NumberData(prompt=f"Game {seed}: guess my number, 1 to 20.", number=number))


class GuesserConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HigherLowerEnv(vf.Env[GuesserConfig]):
    async def run(self, task: NumberTask, agents: vf.Agents) -> None:
        number, guesses = task.data.number, 1
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply.strip() != str(number) and guesses < 5:
                digits = segment.last_reply.strip()
                is_number = digits.isdecimal() and len(digits) < 10  # Python refuses to read thousands of digits
                answer = "no number" if not is_number else "higher" if int(digits) < number else "lower"
                segment = await interaction.turn(answer)
                guesses += 1
        interaction.trace.record_reward("found", float(segment.last_reply.strip() == str(number)), 1.0)
