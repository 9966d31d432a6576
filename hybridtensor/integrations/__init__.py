"""What makes hybridtensor work inside training frameworks, one module per framework.

Each module imports its framework; importing ``hybridtensor`` imports none of them.
"""
