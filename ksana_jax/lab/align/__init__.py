"""Agreement of two ways to compute one model: tokens, log-probabilities, and the operator where differences start."""
