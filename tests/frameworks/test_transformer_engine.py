"""TransformerEngine's own quantizers, as ``qfactory`` makes them, have our bits; needs it and a GPU.

Oracle: its kernels. ``tests/integrations/test_transformer_engine.py`` checks which quantizers they are.
"""

import pytest
import torch

import hybridtensor as ht
from hybridtensor.testing import random_tensor

te = pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine: install it beside a CUDA torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
from transformer_engine.common.recipe import CustomRecipe  # noqa: E402
from transformer_engine.pytorch.quantization import QuantizerRole  # noqa: E402

from hybridtensor.integrations.transformer_engine import qfactory  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the package
BLACKWELL = {"mxfp8", "mxfp8_dequantized_backward", "high_precision_fwd_mxfp8_bwd", "nvfp4+nearest"}
RECIPES = ["fp8", "fp8+pow2_scale", "fp8+dequantized", "fp8/fp8/bf16", "fp8_block", *sorted(BLACKWELL)]


def check_device(recipe):
    if recipe in BLACKWELL and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip(f"TransformerEngine quantizes {recipe} on compute capability 10.0 or above only")


def elements(tensor, direction):
    """Return the bytes of one face of a tensor of TransformerEngine, as a matrix that is contracted along its rows."""
    if hasattr(tensor, "rowwise_sub_storage"):
        tensor = getattr(tensor, f"{direction}_sub_storage")
    if hasattr(tensor, f"_{direction}_data"):
        return getattr(tensor, f"_{direction}_data")
    of_tensor = {"rowwise": "_data", "columnwise": "_transpose"}[direction]
    return getattr(tensor, of_tensor, None)  # None of what is in high precision


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_faces_have_our_bits(recipe, role):
    check_device(recipe)
    x = random_tensor(256, 512, device="cuda")
    theirs = qfactory(recipe)(QuantizerRole("linear", role, ""))(x)
    ours = getattr(ht.HybridConfig.parse(recipe), role).quantize(x)
    compared = 0
    for direction in ("rowwise", "columnwise"):
        bits, face = elements(theirs, direction), getattr(ours, direction)
        if bits is None or not hasattr(face, "face"):
            continue
        own = face.face.qdata.view(torch.uint8)
        assert torch.equal(bits.view(torch.uint8).reshape(own.shape), own), direction
        compared += 1
    assert compared or recipe in ("fp8+dequantized", "fp8/fp8/bf16", *BLACKWELL)


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_linear_computes_as_ours(recipe):
    """Sums are in another order, and each rounds once to bf16."""
    check_device(recipe)
    torch.manual_seed(0)
    layer = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    own = torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16, device="cuda")
    own.weight.data.copy_(layer.weight.data)
    ht.quantize_(own, recipe)
    results = []
    for module in (layer, own):
        x = random_tensor(128, 512, device="cuda").requires_grad_()
        with te.autocast(enabled=module is layer, recipe=CustomRecipe(qfactory=qfactory(recipe))):
            y = module(x)
        y.backward(random_tensor(128, 256, device="cuda", seed=1))
        results.append((y, x.grad, module.weight.grad))
    for name, theirs, mine in zip(("output", "grad_input", "grad_weight"), *results, strict=True):
        assert (theirs - mine).float().norm() <= 2**-7 * mine.float().norm(), name
