"""Training on own and foreign completions: each step takes a batch of groups and returns new weights.

The daemon uses `client.py`, `messages.py` and `senders.py`, which import no torch. `worker.py` is the process that
holds the `Learner` of `learner.py`.
"""
