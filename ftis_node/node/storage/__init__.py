"""What a home takes of its disk, what is removed from it, and what is copied out of it."""
