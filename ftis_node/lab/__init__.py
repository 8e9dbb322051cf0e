"""Small real setups: tiny models, the demo swarm, and experiments."""
