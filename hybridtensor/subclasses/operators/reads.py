"""The operators that weights answer by their high-precision values, whichever form they have: reads and writes.

Elementwise ones, which torch tags, are handled as such (``OpTable.register_elementwise``). All others are listed here,
one by one, so that a product that nobody thought about raises.
"""

from __future__ import annotations

import torch

from hybridtensor.subclasses.op_table import overloads

# Of elementwise operators those that torch does not tag so: ``leaky_relu`` is not in 2.11.
_NAMES = """
    addr all allclose amax amin aminmax any argmax argmin argsort bernoulli
    binary_cross_entropy_with_logits bincount bucketize cat _cdist_forward constant_pad_nd
    count_nonzero cummax cummin cumprod cumsum diag_embed diagonal_copy dist dot embedding
    _embedding_bag _embedding_bag_forward_only fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams flip _foreach_norm frobenius_norm
    full_like _fused_dropout gather geqrf histc histogram huber_loss index index_add index_copy
    index_fill index_put index_select is_pinned is_same_size is_set_to isclose isin kthvalue
    leaky_relu linalg_cholesky_ex _linalg_det _linalg_eigh linalg_eigh linalg_householder_product
    linalg_inv_ex linalg_lu_factor_ex linalg_matrix_exp linalg_norm linalg_pinv linalg_qr
    _linalg_solve_ex _linalg_svd linalg_svd linalg_vector_norm _local_scalar_dense _log_softmax
    logsumexp masked_select mean median mode mse_loss mv nanmean nanmedian nansum native_dropout
    native_layer_norm new_full new_ones nonzero norm ones_like prod put quantile rand_like
    randint_like randn_like renorm repeat roll rot90 scatter scatter_add smooth_l1_loss _softmax
    sort stack std std_mean sum take _to_sparse topk trace tril triu unfold _unique2 var var_mean
    vdot _weight_norm_interface _weight_norm_interface_backward zeros_like _cdist_backward
    elu_backward _embedding_bag_per_sample_weights_backward huber_loss_backward leaky_relu_backward
    mse_loss_backward native_layer_norm_backward smooth_l1_loss_backward softplus_backward
"""

IN_PLACE = overloads(
    *(
        getattr(torch.ops.aten, f"{name}_")
        for name in _NAMES.split()
        if hasattr(torch.ops.aten, f"{name}_")
    )
)
"""Those of the same names that write their first operand, all of its elements or some."""

_OTHER_WRITES = """
    copy exponential fill log_normal normal random uniform zero
    _foreach_copy _foreach_zero
    _fused_adagrad _fused_adam _fused_adamw _fused_sgd _amp_foreach_non_finite_check_and_unscale
"""

WRITES = [
    torch.ops.aten.eye.m_out,
    *IN_PLACE,
    *overloads(*(getattr(torch.ops.aten, f"{name}_") for name in _OTHER_WRITES.split())),
]
"""Operators that write what their schema says."""

READS = [
    op
    for op in overloads(*(getattr(torch.ops.aten, name) for name in _NAMES.split()))
    if not op._schema.is_mutable  # private; nothing else says whether an operator writes
]
