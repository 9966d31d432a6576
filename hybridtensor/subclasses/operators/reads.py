"""The operators that weights answer by their high-precision values, whichever form they have: reads and writes.

Listed one by one: an operator that nobody thought about raises.
"""

from __future__ import annotations

import torch

from hybridtensor.subclasses.op_table import overloads

_NAMES = """
    abs add addcdiv addcmul addr all allclose amax amin aminmax any argmax argmin argsort atan2
    bernoulli binary_cross_entropy_with_logits bincount bucketize cat _cdist_forward ceil clamp
    clamp_max clamp_min constant_pad_nd copysign cos count_nonzero cummax cummin cumprod cumsum
    deg2rad diag_embed diagonal_copy dist div dot elu embedding _embedding_bag
    _embedding_bag_forward_only eq equal erf exp expm1
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams flip floor fmod frac
    frobenius_norm full_like _fused_dropout gather ge gelu geqrf gt histc histogram huber_loss
    hypot index index_add index_select is_pinned is_same_size isclose isfinite isin isinf isnan
    kthvalue le leaky_relu lerp linalg_cholesky_ex _linalg_det _linalg_eigh linalg_eigh
    linalg_householder_product linalg_inv_ex linalg_lu_factor_ex linalg_matrix_exp linalg_norm
    linalg_pinv linalg_qr _linalg_solve_ex _linalg_svd linalg_svd linalg_vector_norm
    _local_scalar_dense log log1p log2 _log_softmax logical_and logical_not logical_or
    logical_xor logsumexp lt masked_fill masked_select max maximum mean median min minimum mode
    mse_loss mul mv nan_to_num nanmean nanmedian nansum native_dropout native_layer_norm ne neg
    new_full new_ones
    nonzero norm ones_like pow prod put quantile rand_like randint_like randn_like reciprocal
    relu remainder renorm repeat roll rot90 round rsqrt rsub scatter scatter_add sgn sigmoid sign
    signbit silu sin smooth_l1_loss _softmax softplus sort sqrt square stack std std_mean sub
    sum take tanh _to_sparse topk trace tril triu trunc unfold _unique2 var var_mean vdot
    _weight_norm_interface _weight_norm_interface_backward where zeros_like
    _foreach_abs _foreach_add _foreach_div _foreach_lerp _foreach_max _foreach_mul _foreach_neg
    _foreach_norm _foreach_sign _foreach_sqrt _foreach_sub

    _cdist_backward elu_backward _embedding_bag_per_sample_weights_backward gelu_backward
    huber_loss_backward leaky_relu_backward mse_loss_backward native_layer_norm_backward
    smooth_l1_loss_backward softplus_backward
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
    copy erfinv exponential fill index_copy index_fill index_put log_normal normal random uniform zero
    _foreach_addcdiv _foreach_addcmul _foreach_clamp_max _foreach_clamp_min _foreach_copy _foreach_zero
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
