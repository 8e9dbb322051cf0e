"""Use of this project's parts from other trainers."""
