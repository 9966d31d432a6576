"""The definitions of the formats, in plain torch operations: slow, exact, on every device. Kernels equal them."""
