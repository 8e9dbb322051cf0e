"""`ftis-node doctor`: checks of the machine, the model, the network and the memory plan."""
