"""Measurements on this machine's GPU, or on its CPU: for `ftis-node doctor --gpu` and the benches.

device.py         time and rates of a device
usage.py          memory and load of a GPU, or of processes
random_model.py   models with realistic shapes and random weights
groups.py         groups of such models as messages of the learner
both_workers.py   both workers of a node on one device
check.py          `doctor --gpu`
"""
