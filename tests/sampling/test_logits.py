"""Temperature, top-k and top-p against their definitions."""

from hypothesis import given
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from mod_jax.sampling import filter_logits


def _oracle(logits_V, temperature, top_k, top_p, min_p):
  """The probability of each token, by following the definition in a loop."""
  logits_V = np.asarray(logits_V, np.float64)
  if temperature == 0:
    return np.eye(len(logits_V))[logits_V.argmax()]
  p_V = special.softmax(logits_V / temperature)
  order = np.argsort(-logits_V, kind='stable')
  if top_k:
    order = order[:top_k]
  p_V = p_V / p_V[order].sum()
  kept, total = [], 0.0
  for token in order:
    kept.append(token)
    total += p_V[token]
    if total >= top_p:
      break
  kept = [token for token in kept if p_V[token] >= min_p * p_V.max()]
  result = np.zeros_like(p_V)
  result[kept] = p_V[kept] / p_V[kept].sum()
  return result


def _kept(logits_BV):
  return np.isfinite(np.asarray(logits_BV))


@given(
  seed=st.integers(0, 2**32 - 1),
  size=st.sampled_from([8, 300]),
  are_tied=st.booleans(),
  temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
  top_k=st.sampled_from([0, 1, 3, 7, 50]),
  top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 1e-50]),
  min_p=st.sampled_from([0.0, 1e-50, 0.01, 0.3, 1.0]),
)
def test_combinations_follow_the_definition(
  seed, size, are_tied, temperature, top_k, top_p, min_p
):
  logits_BV = 2 * np.random.default_rng(seed).normal(size=(3, size))
  if are_tied:
    logits_BV = np.round(logits_BV)
  got_BV = filter_logits(
    jnp.asarray(logits_BV, jnp.float32),
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
  )
  assert got_BV.dtype == jnp.float32
  assert not np.isnan(got_BV).any()
  assert _kept(got_BV).any(axis=-1).all()
  for logits_V, got_V in zip(logits_BV, got_BV, strict=True):
    np.testing.assert_allclose(
      special.softmax(got_V),
      _oracle(logits_V, temperature, top_k, top_p, min_p),
      atol=1e-5,
    )


def test_zero_temperature_leaves_the_first_of_the_likeliest():
  logits_BV = jnp.array([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
  got_BV = filter_logits(logits_BV, temperature=0, top_k=3, top_p=0.9)
  np.testing.assert_array_equal(
    _kept(got_BV), [[False, True, False, False], [True, False, False, False]]
  )


@pytest.mark.parametrize(
  ('top_p', 'kept'),
  # The first one is 0 as a float32.
  [(1e-50, 1), (0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3)],
)
def test_top_p_stops_at_the_token_that_reaches_it(top_p, kept):
  # Four equal tokens: probabilities of exactly 1/4, whose sums are exact.
  got_BV = filter_logits(jnp.zeros((1, 4)), top_p=top_p)
  np.testing.assert_array_equal(_kept(got_BV)[0], np.arange(4) < kept)
