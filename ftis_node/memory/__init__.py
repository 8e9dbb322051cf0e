"""What a run needs of GPU and host memory, where the workers go, and what to change where it does not fit."""
