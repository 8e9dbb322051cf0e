"""Screens, one a file: the main one, and those that keys open from it."""
