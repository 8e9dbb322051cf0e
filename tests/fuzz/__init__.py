"""Fuzzing what reads bytes from peers: one set of targets for hypothesis, the kept corpus and atheris."""
