"""The commands of ``hybridtensor``, a file each: ``add`` adds arguments to a parser, ``run`` returns the exit code."""
