"""Tasks of several turns: a model's text, the environment's answer to it, the next text."""
