"""What ``torch.save`` and ``torch.load`` make of a value."""

import io

import torch


def through_a_file(value, **options):
    """Save a value, and return what is loaded of it.

    Args:
        value: Anything that ``torch.save`` takes.
        options: Of ``torch.load``.
    """
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)
