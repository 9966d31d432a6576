"""The commands of ``hybridtensor``, or ``python -m hybridtensor``: a file each.

A file has ``add``, by which ``__main__`` lists it, and which says what arguments its command takes and which function
runs it. That returns the exit code: 0, or 1 where something is wrong, or 2 where there is nothing to do it to (as for
wrong arguments).
"""
