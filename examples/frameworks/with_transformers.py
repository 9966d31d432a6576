"""Fine-tune a model of Transformers with Trainer: a recipe for ``from_pretrained``, a callback for its state.

A small Llama with random weights stands in for a model of a hub.
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hybridtensor.integrations.transformers import HybridTensorConfig, StepCallback

torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python

folder = tempfile.mkdtemp()
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(folder)
rows = [{"input_ids": (ids := torch.arange(i, i + 32) % 96), "labels": ids} for i in range(64)]

model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HybridTensorConfig("fp8_delayed"))
arguments = TrainingArguments(folder, max_steps=20, learning_rate=1e-2, logging_steps=5, report_to="none", use_cpu=True)
Trainer(model, arguments, train_dataset=rows, callbacks=[StepCallback()]).train()
model.save_pretrained(folder)  # plain weights; config.json has the recipe
print(AutoModelForCausalLM.from_pretrained(folder).model.layers[0].self_attn.q_proj.weight.config)
