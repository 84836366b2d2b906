"""Adaptive computation: each token runs as many learners as it needs."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.acm_mlp import order as order_lib
from mod_jax_kernels.acm_mlp import reference

Implementation = Literal['xla', 'pallas', 'triton']
Activation = Literal['gelu', 'linear']
_HERE = 'mod_jax_kernels.acm_mlp'


def acm_mlp(
  x_TD: jax.Array,
  w1_NDF: jax.Array,
  b1_NF: jax.Array,
  w2_NFD: jax.Array,
  num_learners_T: jax.Array,
  implementation: Implementation | None = None,
  *,
  activation: Activation = 'gelu',
) -> jax.Array:
  """Returns y_TD: the summed outputs of each token's first learners.

  `y_t = Σ_{n < k_t} act(x_t · W1_n + b1_n) · W2_n` (Wójcik et al. 2023, Eq. 1).
  Tokens with similar k share a tile; a learner is computed only for tiles with
  a token that chose it, also in the gradients. Sums are in float32.

  For gradients the forward pass keeps the hidden units before the activation,
  T · N · F numbers in the dtype of x, as a static MLP does. On TPUs nothing is
  kept, and the backward pass recomputes the hidden units.

  The number of learners has no gradient. The computation and the result are in
  the dtype of x, to which weights are cast. Non-finite weights of a learner may
  affect tokens that do not run it but share a tile with one that does. On TPUs,
  a non-finite token may affect other tokens in its block of 128 tokens.

  Args:
    x_TD: tokens, in any order.
    w1_NDF: first kernel of each of N learners.
    b1_NF: bias of their F hidden units.
    w2_NFD: second kernel; its output width may differ from D.
    num_learners_T: k of each token, integers, clipped to 0..N.
    implementation: `xla`; `pallas` (TPU); `triton` (NVIDIA GPU); or None to
      choose by the platform for which the program is lowered.
    activation: function between the two products; `gelu` is the exact GELU.

  Raises:
    ValueError: shapes do not match, numbers of learners are not integers, the
      activation is unknown, or the requested backend is unknown or does not
      support the dtype.
    RuntimeError: the requested backend cannot run here.
  """
  x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T = map(
    jnp.asarray, (x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T)
  )
  ranks = (x_TD.ndim, w1_NDF.ndim, b1_NF.ndim, w2_NFD.ndim)
  if (
    ranks != (2, 3, 2, 3)
    or w1_NDF.shape[1] != x_TD.shape[1]
    or b1_NF.shape != w1_NDF.shape[::2]
    or w2_NFD.shape[:2] != b1_NF.shape
    or num_learners_T.shape != x_TD.shape[:1]
  ):
    raise ValueError(
      f'x {x_TD.shape}, w1 {w1_NDF.shape}, b1 {b1_NF.shape}, w2'
      f' {w2_NFD.shape}, num_learners {num_learners_T.shape}: expected [T, D],'
      ' [N, D, F], [N, F], [N, F, D] and [T].'
    )
  if not jnp.issubdtype(num_learners_T.dtype, jnp.integer):
    raise ValueError(
      f'num_learners of type {num_learners_T.dtype}: expected integers.'
    )
  if activation not in ('gelu', 'linear'):
    raise ValueError(f"activation={activation!r}: expected 'gelu' or 'linear'.")
  if not jnp.issubdtype(x_TD.dtype, jnp.floating):
    raise ValueError(f'x of type {x_TD.dtype}: expected floating point.')
  chosen = OP.choose(implementation, x_TD)
  tokens, width = x_TD.shape
  if 0 in (tokens, *w2_NFD.shape):
    return jnp.zeros((tokens, w2_NFD.shape[-1]), x_TD.dtype)
  if not width:
    chosen = ('xla',)  # Kernels need D > 0; the biases still add.
  return _acm_mlp(
    x_TD,
    *(w.astype(x_TD.dtype) for w in (w1_NDF, b1_NF, w2_NFD)),
    order_lib.order(num_learners_T, w1_NDF.shape[0]),
    activation,
    chosen,
  )


def _lacks(x_TD) -> str | None:
  return dispatch.wrong_types('x', [x_TD])


OP = dispatch.Op(
  dispatch.Backend(
    name='pallas', module=f'{_HERE}.pallas_tpu', platform='tpu', lacks=_lacks
  ),
  dispatch.Backend(
    name='triton', module=f'{_HERE}.triton_gpu', platform='cuda', lacks=_lacks
  ),
  dispatch.Backend(name='xla', module=reference),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _acm_mlp(x_TD, w1_NDF, b1_NF, w2_NFD, order, activation, chosen):
  arrays = x_TD, w1_NDF, b1_NF, w2_NFD, order
  y_TD, _ = OP.run(
    'forward', chosen, *arrays, activation=activation, keep=False
  )
  return y_TD


def _forward(*args):
  *arrays, activation, chosen = args
  y_TD, before_SH = OP.run(
    'forward', chosen, *arrays, activation=activation, keep=True
  )
  return y_TD, (*arrays, before_SH)


def _backward(activation, chosen, residuals, g_TD):
  gradients = OP.run(
    'backward', chosen, *residuals, g_TD, activation=activation
  )
  return *gradients, None


_acm_mlp.defvjp(_forward, _backward)
