"""The endurance run: all attackers at once on one real node, beside two honest senders; `python -m` runs it."""
