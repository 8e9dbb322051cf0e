"""Fuzzing of the code that reads bytes from peers: one set of targets for hypothesis, the corpus and atheris."""
