"""Versions of the weights between a learner and those who follow it."""
