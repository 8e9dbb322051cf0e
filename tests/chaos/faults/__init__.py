"""Faults that the chaos test injects: one file for each kind, and the catalog of all."""
