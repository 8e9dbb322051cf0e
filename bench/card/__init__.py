"""Measurements on this GPU, or on the CPU: time and rates, memory, random models, and both workers of a node."""
