"""One screen a file: the main one, and what keys open from it."""
