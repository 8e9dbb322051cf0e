"""When a step starts, with which groups, and what follows from its result."""
