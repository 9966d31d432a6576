"""Sequence parallelism: activations are quantized where their tokens are, and bytes are gathered."""
