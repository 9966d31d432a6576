"""The parts of ``explain``: records of what it found, and how they are printed."""
