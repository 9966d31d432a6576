"""The example of a sampler with exported tensors: where it computes the function that is trained, nothing differs."""

import rollout


def test_whose_weights_decide():
    again, own = (rollout.train("fp8_rowwise", whose, 3) for _, whose in (rollout.RUNS[1], rollout.RUNS[3]))
    rounded = rollout.train("fp8_rowwise+bf16_weight_values", rollout.RUNS[2][1], 3)
    exact = rollout.train("fp8_rowwise+dequantized", "own export", 3)
    for run in (own, rounded, exact):
        assert (run["k3"], run["largest |log ratio|"]) == (0.0, 0.0)
    assert again["k3"] > 1e-6
    assert rollout.train("bf16", "bf16 export, quantized", 3)["k3"] > 1e-6
