"""`ftis-node eval` and `ensemble`: pass@1 of one model, or of several together. `chat` and `try`: their answers."""
