"""Spawn and supervise worker processes, talk to them, and pass weights between them.

The worker's side is `worker.run_worker`; the daemon's side is `supervisor.Supervisor`. The package knows no particular
worker: higher packages define their own messages. Importing it does not import torch.
"""
