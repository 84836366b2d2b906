"""Products by group, against one product for each group in turn."""

import jax
import jax.numpy as jnp
import numpy as np
from op_tests import Case, OpTests, Target
import pytest

from mod_jax_kernels import dispatch, grouped_dot


def draw(
  seed=0, counts=(3, 0, 4), rest=2, inputs=5, outputs=6, dtype='float32'
):
  rng = np.random.default_rng(seed)
  x_TD = rng.normal(size=(sum(counts) + rest, inputs))
  w_EDF = rng.normal(size=(len(counts), inputs, outputs))
  arrays = [jnp.asarray(x, dtype) for x in (x_TD, w_EDF)]
  return [*arrays, jnp.array(counts)], {}


def plain(x_TD, w_EDF, size_E):
  group_T = jnp.searchsorted(
    jnp.cumsum(size_E), jnp.arange(x_TD.shape[0]), side='right'
  )
  # No group has the number of those behind all groups: zeros.
  w_TDF = w_EDF.at[group_T].get(mode='fill', fill_value=0)
  return jnp.einsum('TD,TDF->TF', x_TD, w_TDF)


class TestGroupedDot(OpTests):
  name = 'grouped_dot'
  inputs = 2
  draw = staticmethod(draw)
  plain = staticmethod(plain)
  cases = (
    Case('some groups'),
    Case('no rest', rest=0),
    Case('no row at all', backends=('xla', 'loop'), counts=(0, 0), rest=0),
    Case('nobody has any', counts=(0, 0), rest=3),
    Case('one has all', counts=(0, 9, 0), rest=0),
    Case('blocks of several sizes', counts=(300, 1, 700, 35), rest=200),
    Case('bfloat16', counts=(40, 9), dtype='bfloat16'),
    Case('wide', counts=(3, 70), inputs=70, outputs=130),
  )
  refused = (
    ({0: jnp.ones((9, 4))}, r'x \[9, 4\], w \[3, 5, 6\].*expected \[T, D\]'),
    ({2: jnp.array([3, 4])}, r'size \[2\]'),
    (
      {1: jnp.ones((0, 5, 6)), 2: jnp.ones(0, jnp.int32)},
      'one group at least',
    ),
  )
  lacking = (
    ('triton', {'dtype': 'float16'}, 'x of float32 or bfloat16, not float16'),
    ('triton', {'counts': (0,), 'rest': 0}, r'empty arrays \(0, 5\)'),
  )
  targets = (
    Target(
      platform='cuda',
      args=(
        jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.int32),
      ),
      calls=3,
    ),
  )

  def test_under_vmap(self, backend):
    if backend == 'xla':
      pytest.skip('JAX has no vmap of some ragged products')
    super().test_under_vmap(backend)

  def test_what_is_of_no_group_harms_nobody(self, backend):
    # Not whole blocks of the loop, the last of which reads the rest.
    (x_TD, w_EDF, size_E), _ = draw(counts=(3, 0, 3))
    dy_TF = jnp.ones((8, 6))

    def both_ways(x_TD, dy_TF):
      def product(x_TD, w_EDF):
        return grouped_dot(x_TD, w_EDF, size_E, backend)

      with dispatch.interpret():
        y_TF, pull = jax.vjp(product, x_TD, w_EDF)
        return y_TF, *pull(dy_TF)

    got = both_ways(*(a.at[6:].set(np.nan) for a in (x_TD, dy_TF)))
    for a, b in zip(got, both_ways(x_TD, dy_TF), strict=True):
      np.testing.assert_array_equal(a, b)


def test_a_cpu_computes_no_more_than_it_needs():
  # XLA's own product is over all groups there.
  (x_TD, w_EDF, size_E), _ = draw(counts=(8,) * 8, rest=0)
  text = jax.jit(grouped_dot).lower(x_TD, w_EDF, size_E).compile().as_text()
  assert 'while' in text
  assert 'f32[64,40]' not in text
