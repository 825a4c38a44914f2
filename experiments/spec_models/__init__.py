"""The target of the studies of speculative decoding and what its draft models are trained with; see train.sh."""
