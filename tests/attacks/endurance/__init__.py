"""The endurance run: all attackers at once on one real node that also has two honest senders."""
