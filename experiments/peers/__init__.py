"""Other engines on the same machine, the same weights and the same requests, in one run."""
