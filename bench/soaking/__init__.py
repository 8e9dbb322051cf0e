"""The parts of `bench/soak.py`: a real swarm, guests that send more, samples, slopes, the plot and the table."""
