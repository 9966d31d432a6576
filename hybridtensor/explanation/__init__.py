"""The parts of ``explain``: what it found, as records, and how that is told on a screen."""
