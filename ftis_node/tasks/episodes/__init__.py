"""Tasks of several turns: a model's text, the environment's answer to it, the next text.

episode.py      protocol of an episode; the task of one; a replay from its texts; a digest of its code
guess.py        a number is guessed from "higher" and "lower", for tiny models
calculator.py   products with a calculator, for small language models; the value of an expression
"""
