"""Generation with a draft against generation without one."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny

from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.sampling import Draft, filter_logits, generate, speculation

VOCAB, NEW = 16, 24
MOD = dataclasses.replace(
  tiny.LM,
  vocab_size=VOCAB,
  num_layers=3,
  width=16,
  num_heads=4,
  num_kv_heads=2,
  # With a tied head the likeliest token would be the last one, for ever.
  tied_head=False,
  routing=MoDConfig(capacity=0.4, offset=1),
)
OF_MLP = dataclasses.replace(
  MOD, routing=dataclasses.replace(MOD.routing, part='mlp')
)
DENSE = dataclasses.replace(MOD, routing=None)
EXACT = RoutingMode(rule='router', chunk=2)
DROP = RoutingMode(rule='router', overflow='drop', slack=1.0)
variables = functools.cache(functools.partial(tiny.variables, seed=1))


PROMPTS = TOKENS_BP, VALID_BP = tiny.prompts(VOCAB)


@functools.cache
def without_draft(config, mode):
  return run(config, mode)


def run(config, mode, prompts=PROMPTS, **kwargs):
  kwargs = {'max_new_tokens': NEW, 'temperature': 0} | kwargs
  return generate(
    config.build(), variables(config), *prompts, mode=mode, **kwargs
  )


CASES = {
  'early, exact': (MOD, EXACT, Draft(kind='early', layers=2, tokens=2)),
  'never, drop': (MOD, DROP, Draft(kind='never')),
  'lookup, drop': (MOD, DROP, Draft(kind='lookup')),
  'lookup, drop of feed-forwards': (OF_MLP, DROP, Draft(kind='lookup')),
  'early, dense': (DENSE, EXACT, Draft(kind='early', layers=2, tokens=1)),
}


class TestGreedy:
  @pytest.mark.parametrize(
    'name',
    [*list(CASES)[:4], pytest.param('early, dense', marks=pytest.mark.slow)],
  )
  def test_the_text_is_that_without_a_draft(self, name):
    config, mode, draft = CASES[name]
    want, got = without_draft(config, mode), run(config, mode, draft=draft)
    np.testing.assert_array_equal(got.tokens_BN, want.tokens_BN)
    np.testing.assert_allclose(got.log_prob_BN, want.log_prob_BN, atol=1e-4)
    np.testing.assert_array_equal(got.length_B, NEW)
    np.testing.assert_allclose(got.routed, want.routed, rtol=1e-6)
    assert want.passes == NEW
    # Some proposals were accepted and some rejected.
    assert -(-NEW // (draft.tokens + 1)) < got.passes < NEW
    assert len({tuple(row) for row in np.asarray(got.tokens_BN)}) == 4
    if mode is DROP:
      assert want.overflow > 0

  def test_stops_where_it_would_stop_without_one(self):
    draft = CASES['never, drop'][2]
    tokens_BN = np.asarray(without_draft(MOD, DROP).tokens_BN)
    # Tokens that end some rows early, and not all.
    ends = next(
      pair
      for pair in itertools.combinations(range(VOCAB), 2)
      if 0 < np.isin(tokens_BN[:, 1:-1], pair).any(axis=-1).sum() < 4
      and np.isin(pair, tokens_BN[:, 1:-1]).all()
    )
    want = run(MOD, DROP, end_token=ends)
    before_BN = np.cumsum(np.isin(tokens_BN, ends), axis=-1) == 0
    np.testing.assert_array_equal(want.length_B, before_BN.sum(axis=-1))
    np.testing.assert_array_equal(
      want.tokens_BN[before_BN], tokens_BN[before_BN]
    )
    got = run(MOD, DROP, end_token=ends, draft=draft)
    for name in ('tokens_BN', 'length_B', 'routed'):
      np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_allclose(got.log_prob_BN, want.log_prob_BN, atol=1e-4)
    assert len(set(np.asarray(got.length_B))) > 1


class TestSampled:
  """Three tokens after one prompt, in many rows: all that can come."""

  rows, new = 4096, 3
  settings = {'temperature': 1.3, 'top_k': 4, 'top_p': 0.95}
  config = dataclasses.replace(MOD, vocab_size=5)
  prompt = (1, 4, 2, 0, 3, 1)

  @functools.cached_property
  def _texts(self):
    return list(itertools.product(range(5), repeat=self.new))

  def _expected(self, mode):
    """Returns the probability of every text, by plain forward passes."""
    texts = np.array([self.prompt + text for text in self._texts])
    model, length = self.config.build(), len(self.prompt)
    # With `drop`, slots are counted by the whole length.
    apply = jax.jit(model.apply, static_argnames='mode')
    output = apply(variables(self.config), jnp.asarray(texts), mode=mode)
    logits_BLV = output.logits_BLV
    probability_B = np.ones(len(texts))
    for i in range(length, length + self.new):
      filtered_BV = filter_logits(logits_BLV[:, i - 1], **self.settings)
      probability_BV = np.asarray(jax.nn.softmax(filtered_BV))
      probability_B *= probability_BV[np.arange(len(texts)), texts[:, i]]
    return probability_B

  def _p_value(self, tokens_BN, probability_X):
    numbers = np.asarray(tokens_BN) @ (5 ** np.arange(self.new)[::-1])
    count_X = np.bincount(numbers, minlength=5**self.new)
    # Texts that are rarely expected count with the rarest of the others.
    order_X = np.argsort(-probability_X)
    groups = np.arange((probability_X * self.rows >= 5).sum())
    observed = np.add.reduceat(count_X[order_X], groups)
    expected = np.add.reduceat(probability_X[order_X], groups)
    expected *= self.rows / expected.sum()
    return scipy.stats.chisquare(observed, expected).pvalue

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ('mode', 'draft'),
    [
      (DROP, Draft(kind='never', tokens=2)),
      (EXACT, Draft(kind='early', layers=1, tokens=3)),
      (DROP, Draft(kind='lookup', tokens=2)),
    ],
    ids=lambda x: getattr(x, 'kind', None) or x.overflow,
  )
  def test_texts_are_drawn_from_the_models_distribution(self, mode, draft):
    given = (np.tile(self.prompt, (self.rows, 1)), None)
    got = run(
      *(self.config, mode, given),
      max_new_tokens=self.new,
      key=jax.random.key(5),
      draft=draft,
      **self.settings,
    )
    expected_X = self._expected(mode)
    np.testing.assert_allclose(expected_X.sum(), 1, atol=1e-4)
    assert self._p_value(got.tokens_BN, expected_X) > 1e-3
    # The draft's own distribution is another one, and so is that of a model
    # which has more room.
    never_X = self._expected(RoutingMode(rule='never'))
    assert self._p_value(got.tokens_BN, never_X) < 1e-6

  def test_a_row_is_what_it_is_beside_others(self):
    settings = {
      'temperature': 2.0,
      'key': jax.random.key(2),
      'draft': CASES['never, drop'][2],
    }
    got = run(MOD, DROP, **settings)
    others_BP = TOKENS_BP.copy()
    others_BP[1:] = (others_BP[1:] + 5) % VOCAB
    again = run(MOD, DROP, (others_BP, VALID_BP), **settings)
    np.testing.assert_array_equal(got.tokens_BN[0], again.tokens_BN[0])
    assert (got.tokens_BN[1:] != again.tokens_BN[1:]).any(axis=-1).all()
    assert len(set(np.asarray(got.tokens_BN[0]))) > 4


def test_equal_distributions_accept_everything():
  probability_BDV = jnp.full((64, 3, 8), 1 / 8)
  tokens_BL, count_B = speculation.accept(
    jnp.zeros((64, 2), jnp.int32),
    *(probability_BDV[:, :2], probability_BDV),
    jnp.ones((64, 2), bool).at[:32, 1].set(False),
    jax.random.split(jax.random.key(0), 64),
  )
  # But for what is not wanted, in whose place the model draws.
  assert count_B.tolist() == [2] * 32 + [3] * 32
  last_B = np.asarray(tokens_BL)[np.arange(64), np.asarray(count_B) - 1]
  assert len(set(last_B)) > 4


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3], [9, 1, 2, 4]),  # All three agree.
    ([7, 2, 5, 3, 2, 6, 2], [6, 2, 6, 2]),  # The latest of several.
    ([4, 5, 5], [5, 5, 5, 5]),  # Its own continuation.
    ([1, 2, 3], [2, 3, 1, 2]),  # Nothing agrees: anything will do.
  ],
)
def test_looks_up_what_followed(text, want):
  text_BT = jnp.array([text + [3] * (12 - len(text))])
  found_BD = speculation.look_up(text_BT, jnp.array([len(text)]), 4)
  if text != [1, 2, 3]:
    assert found_BD[0].tolist() == want
  assert ((found_BD >= 0) & (found_BD < 10)).all()
