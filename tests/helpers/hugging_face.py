"""Small models of transformers, which tests import where it is installed."""

import logging

import torch


def config_of(family="Llama", **options):
    """The configuration of a small model; ``options`` are further ones of its own, or other sizes."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip
    return getattr(transformers, f"{family}Config")(**{**sizes, **options})


def llama(**options):
    """A small Llama, with the same values at each call."""
    import transformers

    config = config_of(**options)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)
