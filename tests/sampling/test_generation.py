"""Generation against the plain forward pass, which knows no cache.

The reference repeats an uncached causal forward pass of one unpadded prompt
for every new token. All of it has one shape: causality lets garbage follow.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import parallel
from mod_jax.layers import attention, routed
from mod_jax.layers import cache as cache_lib
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
from mod_jax.prove import hlo
from mod_jax.sampling import filter_logits, generate, generation, pad_prompts
from mod_jax_kernels.attention import choice

PROMPT, NEW, VOCAB = 6, 6, 20
TOTAL = PROMPT + NEW

# Routed, dense, routed; one set of parameters that every learned rule can use.
BASE = dataclasses.replace(
  tiny.LM,
  vocab_size=VOCAB,
  num_layers=3,
  width=16,
  num_heads=4,
  num_kv_heads=2,
  tied_head=False,
  routing=MoDConfig(capacity=0.25, offset=0, threshold_decay=0.9),
)
DENSE = dataclasses.replace(BASE, num_layers=2, routing=None)
CHOOSING = dataclasses.replace(
  DENSE,
  experts=ExpertsConfig(num_experts=3, choice='expert', threshold_decay=0.9),
)
STRIDE = dataclasses.replace(
  BASE, routing=MoDConfig(capacity=0.4, offset=0, score='stride')
)
GAUSSIAN = dataclasses.replace(
  BASE,
  num_layers=1,
  routing=MoDConfig(capacity=0.3, score='gaussian', period=1, offset=0),
)
SCANNED = dataclasses.replace(
  BASE,
  num_layers=2,
  scan_layers=True,
  routing=dataclasses.replace(BASE.routing, period=1),
)


make_variables = functools.cache(tiny.variables)


PROMPTS = TOKENS_BP, VALID_BP = tiny.prompts(VOCAB)


def forward(config, mode, tokens_BL, valid_BL=None):
  variables = make_variables(config)
  return tiny.apply(config, variables, tokens_BL, valid_BL=valid_BL, mode=mode)


def log_softmax(logits):
  return np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


@dataclasses.dataclass
class Reference:
  """One row, continued greedily by uncached forward passes."""

  tokens_N: np.ndarray
  log_prob_N: np.ndarray
  chosen_RL: np.ndarray  # For each routed layer.
  wanted_RL: np.ndarray  # What the router rule would like to choose.
  length: int

  def read(self, array_RL):
    """Returns its part of the tokens that generation has read."""
    return array_RL[:, : self.length + NEW - 1]


def continue_greedily(config, mode, prompt):
  # How routed rows are processed matters to decoding only.
  mode = dataclasses.replace(mode, chunk=8)
  tokens_L = np.random.default_rng(5).integers(0, VOCAB, TOTAL)
  length = len(prompt)
  tokens_L[:length] = prompt
  valid_BL = None
  if mode.overflow == 'drop':
    # Slots are counted by the row's own length, without what follows it.
    valid_BL = np.arange(TOTAL)[None] < length + NEW
  for n in range(length, length + NEW):
    logits_LV = forward(config, mode, tokens_L[None], valid_BL).logits_BLV[0]
    tokens_L[n] = np.asarray(logits_LV[n - 1]).argmax()
  output = forward(config, mode, tokens_L[None], valid_BL)
  log_prob_LV = log_softmax(output.logits_BLV[0])
  told_L = log_prob_LV[np.arange(TOTAL - 1), tokens_L[1:]]
  none = np.zeros((0, TOTAL), bool)
  return Reference(
    tokens_N=tokens_L[length : length + NEW],
    log_prob_N=told_L[length - 1 : length + NEW - 1],
    chosen_RL=np.array([r.chosen_BL[0] for r in output.routing] or none),
    wanted_RL=np.array([r.score_BL[0] > 0 for r in output.routing] or none),
    length=length,
  )


def references(config, mode, prompts=PROMPTS):
  return [
    continue_greedily(config, mode, tokens_P[valid_P])
    for tokens_P, valid_P in zip(*prompts, strict=True)
  ]


def run(config, mode, prompts=PROMPTS, variables=None, **kwargs):
  kwargs = {'max_new_tokens': NEW, 'temperature': 0} | kwargs
  variables = variables or make_variables(config)
  return generate(config.build(), variables, *prompts, mode=mode, **kwargs)


def assert_follows(got, rows, part='block'):
  """Asserts that every row is what its own reference says."""
  for b, row in enumerate(rows):
    np.testing.assert_array_equal(got.tokens_BN[b], row.tokens_N)
    np.testing.assert_allclose(got.log_prob_BN[b], row.log_prob_N, atol=1e-4)
  chosen = sum(row.read(row.chosen_RL).sum() for row in rows)
  pairs = sum(row.read(row.chosen_RL).size for row in rows)
  if part == 'mlp':
    chosen = 0  # What is told is about attention alone.
  np.testing.assert_allclose(got.routed, chosen / max(pairs, 1), rtol=1e-6)
  np.testing.assert_array_equal(got.length_B, NEW)


ROUTER = RoutingMode(rule='router')
RULES = {
  'router': (BASE, ROUTER),
  'threshold': (BASE, RoutingMode(rule='threshold')),
  'stride': (STRIDE, RoutingMode(rule='fixed')),
  'scanned': (SCANNED, ROUTER),
  'experts that choose, in routed blocks': (
    dataclasses.replace(
      BASE,
      experts=ExpertsConfig(
        num_experts=3, choice='expert', threshold_decay=0.9
      ),
    ),
    RoutingMode(rule='threshold'),
  ),
}


class TestGreedy:
  """Ragged prompts in one batch ≡ step by step, each alone, no cache."""

  @pytest.mark.parametrize('name', RULES)
  def test_follows_the_uncached_forward_pass(self, name):
    config, mode = RULES[name]
    rows = references(config, mode)
    got = run(config, mode)
    assert_follows(got, rows)
    assert got.overflow == 0
    # The case is worth something: rows differ, tokens vary; some are routed,
    # more than a tight cache would hold, and others are not.
    assert len({tuple(row.tokens_N) for row in rows}) == 4
    assert len(set(np.asarray(got.tokens_BN).ravel())) > 6
    if config.routing and mode.rule != 'fixed':
      assert 1.25 * config.routing.capacity < got.routed < 0.8

  def test_a_prompt_of_one_token(self):
    # Under top-k as well, which cannot choose a single token: the rule does.
    prompts = np.array([[3], [11]]), np.ones((2, 1), bool)
    rows = references(SCANNED, ROUTER, prompts)
    assert rows[0].tokens_N.tolist() != rows[1].tokens_N.tolist()
    got = run(SCANNED, ROUTER, prompts, prefill='top_k')
    assert_follows(got, rows)

  @pytest.mark.slow
  def test_is_the_same_under_a_mesh(self):
    boxed = jax.eval_shape(
      SCANNED.build().init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )
    mesh = parallel.make_mesh(
      parallel.MeshConfig(fsdp=2, tensor=2, data=1), jax.devices()[:4]
    )
    places = parallel.shardings(boxed['params'], mesh)
    with jax.set_mesh(mesh):
      params = jax.device_put(make_variables(SCANNED)['params'], places)
      variables = {**make_variables(SCANNED), 'params': params}
      # Another room than elsewhere, hence another trace.
      got = run(SCANNED, ROUTER, variables=variables, max_length=TOTAL + 1)
    assert_follows(got, references(SCANNED, ROUTER))

  @pytest.mark.slow
  def test_bfloat16(self):
    config = dataclasses.replace(SCANNED, dtype='bfloat16')
    cache = lm.LMCache.empty(config, 2, 8, ROUTER)
    assert cache.blocks[0].key_BGSC.dtype == jnp.bfloat16
    got = run(config, ROUTER, variables=make_variables(SCANNED))
    want = run(SCANNED, ROUTER)
    assert got.log_prob_BN.dtype == jnp.float32
    assert np.isfinite(got.log_prob_BN).all()
    # Later tokens may follow others.
    error_B = np.abs(got.log_prob_BN - want.log_prob_BN)[:, 0]
    assert 1e-4 < np.median(error_B) < 0.1


DROP = RoutingMode(rule='router', overflow='drop', slack=1.0)


@pytest.mark.parametrize(
  'part', ['mlp', pytest.param('block', marks=pytest.mark.slow)]
)
def test_drops_what_the_full_forward_pass_drops(part):
  routing = dataclasses.replace(BASE.routing, part=part)
  config = dataclasses.replace(BASE, routing=routing)
  rows = references(config, DROP)
  got = run(config, DROP)
  assert_follows(got, rows, part=part)
  overflow = sum(row.read(row.wanted_RL & ~row.chosen_RL).sum() for row in rows)
  assert got.overflow == overflow > 0
  exact = run(config, ROUTER)
  assert exact.overflow == 0
  assert (got.tokens_BN != exact.tokens_BN).any()


class TestEndToken:
  def _choose(self):
    """Returns the rows, a token that ends some of them, and where."""
    rows = references(BASE, ROUTER)
    for token in range(VOCAB):
      at = [row.tokens_N.tolist() + [token] for row in rows]
      at = [tokens.index(token) for tokens in at]
      if sum(0 < n < NEW - 2 for n in at) >= 1 and NEW in at:
        return rows, token, at
    raise AssertionError('no token ends one row and not another')

  def test_stops_its_row_and_the_loop_where_all_have_stopped(self, monkeypatch):
    draws = []

    def counting(logits_BV):
      jax.debug.callback(lambda: draws.append(1))
      return logits_BV.argmax(axis=-1).astype(jnp.int32)

    def count(prompts):
      draws.clear()
      got = jax.block_until_ready(run(BASE, ROUTER, prompts, end_token=end))
      jax.effects_barrier()
      return got, len(draws)

    # Heard in both runs below: the second uses what the first has compiled.
    monkeypatch.setattr(generation.vocabulary, 'argmax', counting)
    rows, end, at = self._choose()
    got, steps = count(PROMPTS)
    np.testing.assert_array_equal(got.length_B, at)
    assert steps == NEW
    read = chosen = 0
    for b, (row, n) in enumerate(zip(rows, at, strict=True)):
      np.testing.assert_array_equal(got.tokens_BN[b, :n], row.tokens_N[:n])
      np.testing.assert_array_equal(got.tokens_BN[b, n:], end)
      np.testing.assert_allclose(
        got.log_prob_BN[b, : n + 1], row.log_prob_N[: n + 1], atol=1e-4
      )
      np.testing.assert_array_equal(got.log_prob_BN[b, n + 1 :], 0)
      # Its end token, drawn last, is never read.
      last = row.length + min(n, NEW - 1)
      chosen += row.chosen_RL[:, :last].sum()
      read += row.chosen_RL[:, :last].size
    np.testing.assert_allclose(got.routed, chosen / read, rtol=1e-6)

    early = next(b for b, n in enumerate(at) if 0 < n < NEW - 2)
    got, steps = count([x[[early] * 4] for x in PROMPTS])
    np.testing.assert_array_equal(got.length_B, at[early])
    assert steps == at[early] + 1 < NEW
    np.testing.assert_array_equal(got.tokens_BN[:, at[early] :], end)
    np.testing.assert_array_equal(got.log_prob_BN[:, at[early] + 1 :], 0)


class TestTopKPrefill:
  @pytest.mark.slow
  @pytest.mark.parametrize(
    ('config', 'mode'),
    [(SCANNED, ROUTER), (CHOOSING, RoutingMode(rule='threshold'))],
  )
  def test_is_what_training_computes(self, config, mode):
    got = run(config, mode, prefill='top_k')
    causal = run(config, mode)
    difference = got.log_prob_BN - causal.log_prob_BN
    assert np.abs(difference).max() > 0.01
    output = forward(config, RoutingMode(), *PROMPTS)
    log_prob_BPV = log_softmax(output.logits_BLV)
    last_B = [np.flatnonzero(valid_P)[-1] for valid_P in VALID_BP]
    first_BV = log_prob_BPV[np.arange(4), last_B]
    np.testing.assert_array_equal(got.tokens_BN[:, 0], first_BV.argmax(-1))
    np.testing.assert_allclose(
      got.log_prob_BN[:, 0], first_BV.max(-1), atol=1e-4
    )


class TestSampling:
  settings = {
    'temperature': 1.7,
    'top_k': 8,
    'top_p': 0.7,
    'max_new_tokens': 3,
  }
  number = 1024  # Of rows, all with one prompt.

  def _run(self, key, variables=None):
    prompt_P = TOKENS_BP[0]
    prompts = np.repeat(prompt_P[None], self.number, axis=0)
    return run(
      *(DENSE, ROUTER, (prompts, None), variables),
      key=jax.random.key(key),
      **self.settings,
    )

  def _logits(self, tokens):
    tokens_L = np.zeros(TOTAL, int)
    tokens_L[: len(tokens)] = tokens
    output = forward(DENSE, ROUTER, tokens_L[None])
    return output.logits_BLV[0, len(tokens) - 1]

  def _filtered(self, logits_V, **changes):
    settings = {**self.settings, **changes}
    del settings['max_new_tokens']
    return np.asarray(
      jax.nn.softmax(filter_logits(logits_V[None], **settings)[0])
    )

  @pytest.mark.slow
  def test_draws_from_the_filtered_distribution(self):
    prompt_P = TOKENS_BP[0]
    got = self._run(0)
    logits_V = self._logits(prompt_P)
    want_V = self._filtered(logits_V)
    frequency_V = np.bincount(got.tokens_BN[:, 0], minlength=VOCAB)
    frequency_V = frequency_V / self.number

    def fits(want_V):
      margin_V = 4 * np.sqrt(want_V * (1 - want_V) / self.number)
      return (np.abs(frequency_V - want_V) <= margin_V).all()

    assert fits(want_V)
    assert (want_V > 0).sum() > 2
    # Each of the settings shows.
    for change in ({'temperature': 1.0}, {'top_k': 0}, {'top_p': 1.0}):
      assert not fits(self._filtered(logits_V, **change))
    # The next token is drawn from what follows the row's own first.
    seconds = set()
    for token in set(np.asarray(got.tokens_BN[:, 0])):
      rows_R = np.flatnonzero(got.tokens_BN[:, 0] == token)
      next_V = self._logits([*prompt_P, token])
      drawn_R = np.asarray(got.tokens_BN[rows_R, 1])
      assert (self._filtered(next_V)[drawn_R] > 0).all()
      np.testing.assert_allclose(
        got.log_prob_BN[rows_R, 1], log_softmax(next_V)[drawn_R], atol=1e-4
      )
      seconds |= {tuple(np.flatnonzero(self._filtered(next_V)))}
    assert len(seconds) > 1
    # Log-probabilities are the model's, before temperature and filters.
    np.testing.assert_allclose(
      got.log_prob_BN[:, 0],
      log_softmax(logits_V)[got.tokens_BN[:, 0]],
      atol=1e-4,
    )

  def test_every_draw_is_its_own(self):
    # A head of zeros makes all logits equal: only the noise decides.
    variables = make_variables(DENSE)
    head = {'kernel': jnp.zeros_like(variables['params']['head']['kernel'])}
    variables = {'params': {**variables['params'], 'head': head}}
    draws = [self._run(key, variables).tokens_BN for key in (1, 2)]
    # Across keys and steps, equal as often as chance has it.
    columns = np.concatenate(draws, axis=1).T
    choices = len(set(columns.ravel()))
    assert choices > 3
    for i in range(len(columns)):
      for other in columns[:i]:
        assert (columns[i] == other).mean() < 2 / choices
    assert len({tuple(row) for row in np.asarray(draws[0])}) > 100

  @pytest.mark.slow
  def test_gaussian_routing_draws_at_the_capacity(self):
    prompts = np.ones((32, PROMPT), int), np.ones((32, PROMPT), bool)

    def routed(key):
      got = run(GAUSSIAN, 'fixed', prompts, key=jax.random.key(key))
      return float(got.routed), np.asarray(got.tokens_BN)

    (first, tokens), (again, _), (other, _) = routed(0), routed(0), routed(1)
    number = 32 * (TOTAL - 1) * GAUSSIAN.num_routed
    margin = 4 * math.sqrt(0.3 * 0.7 / number)
    assert abs(first - 0.3) < margin
    assert first == again != other
    # Rows are routed independently, so the same prompt goes on differently.
    assert len({tuple(row) for row in tokens}) > 4


class TestApplyWithCache:
  """The model's own jitted `apply`, for those who write their own loop."""

  # With room for more, an eighth, a quarter, a half and all of it are read.
  # And pieces are processed row by row, or by gathering the chosen tokens.
  @pytest.mark.slow
  @pytest.mark.parametrize(('room', 'short'), [(10, 16), (16, 1)])
  def test_pieces_of_any_length_equal_the_whole(self, room, short, monkeypatch):
    monkeypatch.setattr(attention, '_SHORT', 2)
    monkeypatch.setattr(routed, '_SHORT', short)
    jax.clear_caches()  # Blocks that were traced before are not short.
    model, variables = BASE.build(), make_variables(BASE)
    mode = RoutingMode(rule='threshold', chunk=2)

    @jax.jit
    def step(variables, tokens_BL, cache):
      return model.apply(variables, tokens_BL, mode=mode, cache=cache)

    tokens_BL = np.random.default_rng(0).integers(0, VOCAB, (4, 10))
    # The same layout of the whole as in the reference, one row at a time.
    whole = RoutingMode(rule='threshold', chunk=8)
    whole_BLV = np.concatenate(
      [
        forward(BASE, whole, np.pad(row, (0, TOTAL - 10))[None]).logits_BLV
        for row in tokens_BL
      ]
    )
    cache = lm.LMCache.empty(BASE, 4, room, mode)
    pieces, counts = [], []
    for start, end in ((0, 4), (4, 8), (8, 9), (9, 10)):
      output = step(variables, tokens_BL[:, start:end], cache)
      cache = output.cache
      pieces.append(output.logits_BLV)
      counts.append(sum(r.chosen_BL.sum(axis=-1) for r in output.routing))
    np.testing.assert_allclose(
      np.concatenate(pieces, axis=1), whole_BLV[:, :10], atol=1e-4
    )
    lengths_RB = [cache.blocks[i].length_B for i in (0, 2)]
    np.testing.assert_array_equal(sum(lengths_RB), sum(counts))
    # Each sequence has its own length in each routed layer.
    assert len(set(np.ravel(lengths_RB))) > 2


def test_the_first_call_takes_no_more_than_it_must(equations):
  """Layers alike are traced once, and a prompt's logits never all exist."""
  config = dataclasses.replace(DENSE, num_layers=3, vocab_size=2048)
  tokens_BP = np.zeros((2, 128), np.int32)

  def call(variables):
    return generate(
      *(config.build(), variables, tokens_BP), max_new_tokens=2, temperature=0.0
    )

  jaxpr = jax.make_jaxpr(call)(make_variables(config)).jaxpr
  layers, sizes = [], []
  for equation in equations(jaxpr):
    if equation.params.get('name') == '_run':
      layers.append(id(equation.params['jaxpr']))
    sizes += [x.aval.size for x in equation.outvars]
  assert len(layers) == 6
  assert len(set(layers)) == 2  # Of the prompt, and of a token.
  assert max(sizes) < tokens_BP.size * config.vocab_size


class TestNoWork:
  """Where no row is routed, a decoding step does not run the routed block."""

  BATCH, ROOM = 5, 11
  CACHE = (BATCH, 2, ROOM, 4)
  # Four projections, two products of attention, three kernels of SwiGLU.
  BLOCK = 9

  config = dataclasses.replace(
    BASE,
    num_layers=2,
    routing=dataclasses.replace(BASE.routing, threshold_decay=0.0),
  )

  def _step(self, chunk):
    mode = RoutingMode(rule='router', chunk=chunk)
    model = self.config.build()

    def step(params, tokens_B1, cache):
      output = model.apply(
        {'params': params}, tokens_B1, mode=mode, cache=cache
      )
      return output.logits_BLV, output.cache, output.routing[0].chosen_BL

    arguments = (
      make_variables(self.config)['params'],
      np.zeros((self.BATCH, 1), np.int32),
      lm.LMCache.empty(self.config, self.BATCH, self.ROOM, mode),
    )
    return jax.jit(step, donate_argnames='cache'), arguments

  def test_the_compiled_program_keeps_it_there(self):
    step, arguments = self._step(3)
    text = step.lower(*arguments).compile().as_text()
    cost = hlo.cost(text)
    inside = [x for x in cost.products if '/while/body/' in x.source]
    assert len(inside) == self.BLOCK
    assert len(cost.products) == 2 * self.BLOCK + 1
    assert len(cost.endless) == 1  # The loop, of as many turns as are needed.
    # Caches are written in place: neither copied nor selected as a whole.
    shape = ','.join(map(str, self.CACHE))
    kinds = set(re.findall(rf'= f32\[{shape}\]\S* ([\w-]+)\(', text))
    assert kinds
    assert not kinds & {'copy', 'select', 'transpose', 'convert'}

  @pytest.mark.slow
  def test_turns_of_the_loop_are_as_many_as_routed_rows_need(self, monkeypatch):
    chunk, turns = 3, []
    append = cache_lib.KVCache.append

    def counting(cache, key_RTGC, value_RTGC, position_RT, valid_RT, rows_R):
      if rows_R.shape == (chunk,):  # Not the dense block, which has all rows.
        jax.debug.callback(lambda: turns.append(1))
      return append(cache, key_RTGC, value_RTGC, position_RT, valid_RT, rows_R)

    monkeypatch.setattr(cache_lib.KVCache, 'append', counting)
    jax.clear_caches()  # Blocks that were traced before do not count.
    step, (params, _, _) = self._step(chunk)
    # The first block is routed: a token's embedding alone decides.
    params = dict(params, block_0=dict(params['block_0']))
    sign_V = jnp.where(jnp.arange(VOCAB) % 2, 5.0, -5.0)
    params['embedding'] = params['embedding'].at[:, 0].set(sign_V)
    params['block_0']['router'] = {'kernel': jnp.eye(1, 16)[0]}
    for routed_B in (
      [0, 0, 0, 0, 0],
      [0, 0, 0, 1, 0],
      [1, 0, 1, 0, 1],
      [0, 1, 1, 1, 1],
      [1, 1, 1, 1, 1],
    ):
      turns.clear()
      _, (_, _, cache) = self._step(chunk)  # The last one was donated.
      tokens_B1 = np.array([[4 + r] for r in routed_B])
      result = step(params, tokens_B1, cache)
      jax.block_until_ready(result)
      jax.effects_barrier()
      np.testing.assert_array_equal(result[2][:, 0], routed_B)
      assert len(turns) == -(-sum(routed_B) // chunk)
      np.testing.assert_array_equal(result[1].blocks[0].length_B, routed_B)


class TestPadPrompts:
  def test_pads_on_either_side(self):
    tokens_BP, valid_BP = pad_prompts([[5], [6, 7, 8]])
    np.testing.assert_array_equal(tokens_BP, [[0, 0, 5], [6, 7, 8]])
    np.testing.assert_array_equal(valid_BP, [[0, 0, 1], [1, 1, 1]])
    tokens_BP, valid_BP = pad_prompts([[5], [6, 7, 8]], side='right')
    np.testing.assert_array_equal(tokens_BP, [[5, 0, 0], [6, 7, 8]])
    np.testing.assert_array_equal(valid_BP, [[1, 0, 0], [1, 1, 1]])
    assert tokens_BP.dtype == np.int32


def test_a_prompt_fits_by_its_tokens_not_its_padding():
  tokens_BP = np.array([[0, 0, 0, 0, 1, 2]])
  row = continue_greedily(DENSE, ROUTER, [1, 2])
  got = run(
    *(DENSE, ROUTER, (tokens_BP, tokens_BP > 0)),
    max_length=2 + 3,
    max_new_tokens=3,
  )
  np.testing.assert_array_equal(got.tokens_BN[0], row.tokens_N[:3])


@pytest.mark.parametrize('platform', ['cpu', 'cuda'])
def test_only_a_gpu_is_told_to_keep_products_of_one_row(platform, monkeypatch):
  options = []
  monkeypatch.setattr(choice, 'platform', lambda: platform)
  monkeypatch.setattr(
    jax, 'jit', lambda function, **more: options.append(more) or function
  )
  add = generation.jit_steps(static_argnums=0)(lambda x, y: x + y)
  assert add(1, 2) == add(1, 2) == 3
  told = {'compiler_options': generation.GPU_OPTIONS}
  assert options == [
    {'static_argnums': 0, **(told if platform == 'cuda' else {})}
  ]
