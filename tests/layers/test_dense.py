"""Products of features and parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax.layers import dense


@pytest.mark.parametrize(
  ('spec', 'dtype', 'rows'),
  [
    ('TI,IO->TO', 'float32', 1),
    ('TI,IO->TO', 'bfloat16', 2),
    ('BLD,DV->BLV', 'float32', 1),
    ('BLD,VD->BLV', 'float32', 1),
    ('BLD,VD->BLV', 'bfloat16', 2),
    # The kernel, too, has the first axis.
    ('NBLF,NFD->NBLD', 'bfloat16', 1),
    # Only the result has the kernel's axis first.
    ('BLD,EDF->EBLF', 'bfloat16', 1),
  ],
)
def test_a_single_row(spec, dtype, rows):
  """XLA for CPUs is slow in bfloat16, where it gets two."""
  of_x, of_kernel = spec.partition('->')[0].split(',')
  rng, sizes = np.random.default_rng(0), {of_x[-1]: 5, 'O': 3, 'V': 3, 'E': 3}
  x, kernel = (
    jnp.asarray(rng.normal(size=[sizes.get(i, 1) for i in letters]), dtype)
    for letters in (of_x, of_kernel)
  )
  call = functools.partial(dense.einsum, spec, out_dtype='float32')
  expected = np.einsum(spec, np.float32(x), np.float32(kernel))
  np.testing.assert_allclose(call(x, kernel), expected, rtol=1e-5, atol=1e-6)
  products = [
    min(x.aval.size for x in equation.invars) // 5  # The features are fewer.
    for equation in jax.make_jaxpr(call)(x, kernel).eqns
    if equation.primitive.name == 'dot_general'
  ]
  assert products == [rows]
