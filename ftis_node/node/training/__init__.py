"""Policy of training steps: when a step starts, which groups it takes, and what its report changes."""
