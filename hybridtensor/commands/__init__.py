"""The commands of ``hybridtensor``, a file each: ``add`` registers one with argparse, its function returns the exit
code."""
