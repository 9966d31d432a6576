"""Triton kernels, one file per operator with the operator's name; imported only when a CUDA tensor needs one."""
