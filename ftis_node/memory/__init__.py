"""Memory plan of a run: GPU and host memory, the placement of the workers, and changes if it does not fit."""
