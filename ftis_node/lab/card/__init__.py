"""Measurements on this machine's GPU, or on its CPU: for `ftis-node doctor --gpu` and the benches."""
