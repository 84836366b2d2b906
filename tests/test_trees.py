"""Parameters by name, and what is said where they differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import trees
from mod_jax.errors import UserError


def params(seed=0, layers=3, width=2, **more):
  """Returns a small tree in the manner of the models."""
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)

  blocks = {
    f'block_{i}': {'mlp': {'up': {'kernel': draw(width, 4)}}}
    for i in range(layers)
  }
  return {**blocks, 'norm': {'scale': draw(width)}, **more}


def test_merge_takes_the_sources_values_and_the_fresh_types():
  # The fresh values that are replaced need not exist.
  fresh = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params(seed=0)))
  source = params(seed=1)
  merged = trees.merge(fresh, jax.tree.map(np.float64, source))
  tiny.same(merged, source)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(merged))


def test_merge_keeps_what_may_be_new_and_leaves_what_may_be_dropped():
  router = {'kernel': jnp.ones(2)}
  fresh = params(seed=0, router=router)
  source = params(seed=1, head={'bias': jnp.zeros(2)})
  merged = trees.merge(fresh, source, new=['router/.*'], dropped='head/.*')
  assert set(merged) == set(fresh)
  assert merged['router']['kernel'] is router['kernel']


def test_patterns_match_whole_names():
  fresh = params(router={'kernel': jnp.ones(2)})
  with pytest.raises(UserError, match='missing: router/kernel'):
    trees.merge(fresh, params(), new=['router'])
  with pytest.raises(UserError, match='unexpected: router/kernel'):
    trees.merge(params(), fresh, dropped=['kernel'])


def test_names_that_differ_in_more_than_the_first_number_stay_apart():
  found = {
    f'layers.{i}.mlp.{j}.weight': (1,) for i in (0, 1, 3) for j in (0, 3)
  }
  with pytest.raises(UserError) as caught:
    trees.compare({}, found)
  assert str(caught.value).splitlines()[1:] == [
    '  unexpected: layers.{0..1,3}.mlp.0.weight',
    '  unexpected: layers.{0..1,3}.mlp.3.weight',
  ]
