"""The parts of `bench/soak.py`: a swarm, guests that send more, samples, slopes and the table."""
