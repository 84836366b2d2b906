"""The training step: pure, weighted, and the same in one piece or in parts."""

import functools

import chex
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mod_jax import optimizer as optimizer_lib
from mod_jax import parallel, tasks
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.runs.run_config import TrainConfig
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import state as state_lib
from mod_jax.train.step import train_step

EVERY = {'capacity': 0.25, 'period': 1, 'offset': 0}
PLAIN = MoDConfig(**EVERY, router_loss=0.0)
FULL = MoDConfig(
  **EVERY, router_loss=0.5, predictor_width=8, threshold_decay=0.9
)
# Plain gradients: Adam's first step is nearly their sign, which would turn
# rounding into differences and hide factors.
SGD = optax.sgd(1.0)


# One block, which is routed, and everything once: compiling takes the time.
@functools.cache
def make_task(routing, **train):
  model = LMConfig(
    num_layers=1, width=16, num_heads=2, mlp_dim=32, routing=routing
  )
  config = ExperimentConfig(model=model, train=TrainConfig(**train))
  return tasks.make_task(config)


@functools.cache
def make_state(task, optimizer=SGD):
  mesh = parallel.make_mesh(parallel.MeshConfig(), jax.devices()[:1])
  abstract = state_lib.abstract_state(task, optimizer, mesh)
  return state_lib.create_state(0, task, optimizer, abstract)


@functools.cache
def compiled_step(task, optimizer, grad_accum_steps):
  step = functools.partial(
    train_step,
    task=task,
    optimizer=optimizer,
    static_args=0.0,
    grad_accum_steps=grad_accum_steps,
  )
  return jax.jit(step)


def run_step(task, state, batch, optimizer=SGD, grad_accum_steps=1):
  return compiled_step(task, optimizer, grad_accum_steps)(state, batch)


def make_batch(rows=8, length=16, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 256, (rows, length + 1), dtype=np.int32)
  return {
    'tokens': tokens[:, :-1],
    'targets': tokens[:, 1:],
    'weights': np.ones((rows, length), np.float32),
  }


def value(pair):
  return float(pair[0]) / float(pair[1])


class Average:
  """A task so small that everything about it can be worked out by hand.

  The loss is the weighted mean of `w · x`; the metric `draw` is one uniform
  number; the mutable counts how often the loss was called for.
  """

  config = ExperimentConfig()

  def init(self, key):
    return {'params': {'w': jnp.float32(2.0)}, 'count': {'n': jnp.int32(0)}}

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    total = jnp.sum(params['w'] * batch['x'] * batch['weights'])
    weight = jnp.sum(batch['weights'])
    metric_sums = {
      'loss': (total, weight),
      'draw': (jax.random.uniform(rng), jnp.ones(())),
    }
    model_state = {'count': {'n': model_state['count']['n'] + 1}}
    return [(total, weight)], (metric_sums, model_state)


class TestAverage:
  @pytest.mark.parametrize('grad_accum_steps', [1, 2, 4])
  def test_weights_of_microbatches_count(self, grad_accum_steps):
    batch = {
      'x': jnp.array([1.0, 2.0, 30.0, 40.0]),
      'weights': jnp.array([1.0, 0.0, 2.0, 1.0]),
    }
    mean = (1 + 60 + 40) / 4
    task = Average()
    state, metric_sums = run_step(
      task, make_state(task), batch, grad_accum_steps=grad_accum_steps
    )
    assert value(metric_sums['loss']) == pytest.approx(2 * mean)
    assert float(state.params['w']) == pytest.approx(2 - mean)
    assert value(metric_sums['grad_norm']) == pytest.approx(mean)
    assert int(state.model_state['count']['n']) == grad_accum_steps
    assert int(state.step) == 1

  def test_nothing_to_learn_from_is_no_nan(self):
    batch = {'x': jnp.ones(4), 'weights': jnp.zeros(4)}
    task = Average()
    for parts in (1, 2):
      state, metric_sums = run_step(
        task, make_state(task), batch, grad_accum_steps=parts
      )
      assert float(state.params['w']) == 2
      assert float(metric_sums['grad_norm'][0]) == 0

  def test_each_step_and_each_microbatch_draws_anew(self):
    batch = {'x': jnp.ones(4), 'weights': jnp.ones(4)}
    task = Average()
    state = make_state(task)

    def draws(state):
      after, metric_sums = run_step(task, state, batch)
      chex.assert_trees_all_equal(_data(after.rng), _data(state.rng))
      return value(metric_sums['draw']), after

    first, after = draws(state)
    second, _ = draws(after)
    assert first != second
    assert draws(state)[0] == first
    assert draws(after.replace(step=jnp.int32(0)))[0] == first
    _, metric_sums = run_step(task, state, batch, grad_accum_steps=2)
    total, weight = metric_sums['draw']
    rngs = jax.random.split(jax.random.fold_in(state.rng, 0), 2)
    expected = [float(jax.random.uniform(rng)) for rng in rngs]
    assert expected[0] != expected[1]
    assert float(weight) == 2
    assert float(total) == pytest.approx(sum(expected))


class TestAverages:
  def test_follow_quickly_at_first_and_then_slowly(self):
    task = Average()
    state = make_state(task)
    assert state.ema is None
    assert state.eval_params is state.params
    # Not the parameters, so that the share of the new ones shows.
    state = state.replace(ema={'w': jnp.float32(10.0)})
    batch = {'x': jnp.ones(4), 'weights': jnp.ones(4)}
    for steps, kept in ((0, 0.1), (8, 0.5), (1000, 0.9)):
      before = state.replace(step=jnp.int32(steps))
      after, _ = train_step(
        before, batch, task=task, optimizer=SGD, static_args=0.0, ema_decay=0.9
      )
      assert float(after.params['w']) == 1
      assert float(after.ema['w']) == pytest.approx(kept * 10 + 1 - kept)
      assert after.eval_params is after.ema

  def test_of_what_stays_stay_bit_by_bit(self):
    task = Average()
    w = jnp.float32(0.1)
    state = make_state(task).replace(params={'w': w}, ema={'w': w})
    batch = {'x': jnp.ones(4), 'weights': jnp.zeros(4)}
    for _ in range(3):
      state, _ = train_step(
        state, batch, task=task, optimizer=SGD, static_args=0.0, ema_decay=0.3
      )
    assert float(state.ema['w']) == float(w)

  def test_begin_as_the_parameters_and_lie_as_they_do(self):
    task = make_task(PLAIN, ema_decay=0.9)
    mesh = parallel.make_mesh(parallel.MeshConfig(data=1, fsdp=4, tensor=2))
    with jax.set_mesh(mesh):
      abstract = state_lib.abstract_state(task, SGD, mesh)
      state = state_lib.create_state(0, task, SGD, abstract)
    chex.assert_trees_all_equal(state.ema, state.params)
    specs = [x.sharding.spec for x in jax.tree.leaves(state.ema)]
    assert specs == [x.sharding.spec for x in jax.tree.leaves(state.params)]
    assert any(any(spec) for spec in specs)
    # Both may be donated.
    jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)


class Taught(Average):
  """Its loss is a frozen number times that of `Average`."""

  def losses(self, params, model_state, batch, rng, static_args, teacher=None):
    ((total, weight),), told = super().losses(
      params, model_state, batch, rng, static_args
    )
    return [(teacher['factor'] * total, weight)], told


@pytest.mark.parametrize('grad_accum_steps', [1, 2])
def test_frozen_arrays_are_arguments(grad_accum_steps):
  task = Taught()
  batch = {'x': jnp.ones(4), 'weights': jnp.ones(4)}
  step = compiled_step(task, SGD, grad_accum_steps)
  for factor in (1.0, 3.0):  # One program for both.
    state, _ = step(make_state(task), batch, {'factor': jnp.float32(factor)})
    assert float(state.params['w']) == pytest.approx(2 - factor)
  assert step._cache_size() == 1


@pytest.mark.slow
def test_accumulation_of_the_auxiliary_losses():
  task = make_task(FULL)
  state = make_state(task)
  batch = make_batch()
  # As many real tokens in all rows, of which unlike many are learnt, as where
  # prompts are left out: the auxiliary losses are means over the former.
  lengths = np.array([16, 1, 2, 9] * 2)
  batch['weights'] *= np.arange(16) < lengths[:, None]
  whole, whole_sums = run_step(task, state, batch)
  parts, metric_sums = run_step(task, state, batch, grad_accum_steps=4)
  moved = jax.tree.map(lambda a, b: a - b, whole.params, state.params)
  assert float(optax.tree.norm(moved)) > 0.1
  chex.assert_trees_all_close(parts.params, whole.params, atol=2e-6)
  assert {'router/bce', 'predictor/bce', 'router/accuracy'} < metric_sums.keys()
  assert float(metric_sums['loss'][1]) == lengths.sum()
  # Once, after the microbatches.
  assert float(metric_sums['grad_norm'][1]) == 1
  for name, pair in metric_sums.items():
    assert value(pair) == pytest.approx(value(whole_sums[name]), rel=1e-5)


@pytest.mark.slow
def test_weights_are_added_up_without_the_model():
  state, batch = make_state(make_task(FULL)), make_batch()
  products = [
    compiled_step(make_task(FULL), SGD, parts)
    .lower(state, batch)
    .compile()
    .as_text()
    .count(' dot(')
    for parts in (1, 2)
  ]
  assert products[0] == products[1] > 0


def _data(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x


def _split_predictor(params):
  flat = flax.traverse_util.flatten_dict(params)
  predictor = {k: v for k, v in flat.items() if 'predictor' in k}
  return predictor, {k: v for k, v in flat.items() if k not in predictor}


def test_a_predictor_leaves_the_language_model_alone():
  task = make_task(FULL)
  # So low that everything is clipped; and with such an epsilon Adam's update
  # still shows the size of the gradient.
  config = OptimizerConfig(warmup_steps=0, clip_norm=1e-3, epsilon=1e-3)
  optimizer = optimizer_lib.make_optimizer(config, 10)
  state = make_state(task, optimizer)
  predictor, rest = _split_predictor(state.params)
  assert predictor
  # A predictor with large gradients, which would dominate a common norm.
  loud = {k: 100 * v for k, v in predictor.items()}
  louder = state.replace(params=flax.traverse_util.unflatten_dict(loud | rest))
  quiet_state, quiet = run_step(task, state, make_batch(), optimizer)
  loud_state, metric_sums = run_step(task, louder, make_batch(), optimizer)
  assert value(metric_sums['grad_norm']) > 2 * value(quiet['grad_norm']) > 1e-2
  quiet_predictor, quiet_rest = _split_predictor(quiet_state.params)
  loud_predictor, loud_rest = _split_predictor(loud_state.params)
  chex.assert_trees_all_equal(loud_rest, quiet_rest)
  for before, after in (
    (rest, quiet_rest),
    (predictor, quiet_predictor),
    (loud, loud_predictor),
  ):
    moved = jax.tree.map(lambda a, b: a - b, after, before)
    assert float(optax.tree.norm(moved)) > 1e-5


@pytest.mark.parametrize(
  'routing',
  [
    FULL,
    MoDConfig(**EVERY, gate='sigmoid', router_std=0.0),
  ],
  ids=['learned', 'tied'],
)
def test_gradients_are_finite_and_reach_everything(routing):
  task = make_task(routing)
  state = make_state(task)
  batch = make_batch()
  # A document of one token, and a row of nothing but padding.
  segments = np.ones_like(batch['tokens'])
  segments[0, 8:] = 2
  segments[1, 1:] = 0
  segments[2] = 0
  batch['segments'] = segments
  batch['weights'] = batch['weights'] * (segments > 0)
  # With SGD of rate 1 the difference is the gradient.
  after, metric_sums = run_step(task, state, batch)
  assert float(metric_sums['loss'][1]) == (segments > 0).sum()
  grads = jax.tree.map(lambda a, b: a - b, state.params, after.params)
  for path, grad in flax.traverse_util.flatten_dict(grads).items():
    assert np.isfinite(grad).all(), path
    assert np.any(np.asarray(grad) != 0), path
