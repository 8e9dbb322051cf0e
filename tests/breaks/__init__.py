"""Do the tests notice? Small defects, made in a copy of the tree one by one: `python -m tests.breaks`."""
