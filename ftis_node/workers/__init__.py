"""Spawning, supervising and talking to worker processes, and handing weights over between them.

The worker's side is `worker.run_worker`; the daemon's side is `supervisor.Supervisor`. Nothing here knows what a worker
does: rooms above bring their own messages. No torch at import.
"""
