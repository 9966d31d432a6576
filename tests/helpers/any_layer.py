"""Named recipes that any linear layer can have, whatever its sizes, persistent ones and experts too."""

import hybridtensor as ht

ANY_LAYER = [name for name in ht.recipes.RECIPES if name != "quartet2"]
"""``quartet2`` takes outputs in multiples of 128 only: ``test_eden_layers``, ``test_eden_experts``,
``test_eden_persistent``."""
