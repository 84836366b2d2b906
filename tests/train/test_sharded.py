"""Eight devices do what one does, and each holds only its share."""

import dataclasses
import functools

import chex
import flax.traverse_util
import jax
import numpy as np
import pytest
import tiny
import tiny_runs

from mod_jax import config as config_lib
from mod_jax import optimizer as optimizer_lib
from mod_jax import parallel, tasks
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import OptimizerConfig
from mod_jax.parallel import MeshConfig
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks import phases
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import state as state_lib
from mod_jax.train.evaluation import held_out, mesh_of
from mod_jax.train.step import train_step

STEPS = 4
V, D, H, C, F = 256, 16, 8, 2, 32
# A large epsilon: the update then follows the gradient, and not, as Adam's
# first ones, the sign of what may be rounding.
OPTIMIZER = optimizer_lib.make_optimizer(
  OptimizerConfig(learning_rate=0.1, warmup_steps=0, epsilon=1e-2), STEPS
)
# Each axis is divided in one of them. Where arrays lie on other meshes is a
# matter of the table of axes, and of its own tests.
MESHES = {
  'tensor 4': MeshConfig(data=2, tensor=4),
  'mixed': MeshConfig(data=2, fsdp=2, tensor=2),
}


@functools.cache
def make_task(scan_layers=False):
  routing = MoDConfig(
    capacity=0.25, router_loss=0.1, predictor_width=8, threshold_decay=0.9
  )
  model = LMConfig(
    # Two groups make a loop; one would be unrolled by the compiler.
    num_layers=4 if scan_layers else 2,
    width=D,
    num_heads=H,
    mlp_dim=F,
    routing=routing,
    scan_layers=scan_layers,
    remat='dots' if scan_layers else 'none',
  )
  return tasks.make_task(ExperimentConfig(model=model))


def make_mesh(config):
  if config is None:
    return parallel.make_mesh(MeshConfig(), jax.devices()[:1])
  return parallel.make_mesh(config)


def make_batches():
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    tokens = rng.integers(0, V, (16, 17), dtype=np.int32)
    # In pairs: both of two microbatches, every other row, weigh the same.
    lengths = np.repeat(rng.integers(4, 17, 8), 2)[:, None]
    yield {
      'tokens': tokens[:, :-1],
      'targets': tokens[:, 1:],
      'weights': (np.arange(16) < lengths).astype(np.float32),
    }


def start(task, mesh):
  with jax.set_mesh(mesh):
    abstract = state_lib.abstract_state(task, OPTIMIZER, mesh)
    return abstract, state_lib.create_state(0, task, OPTIMIZER, abstract)


def take_steps(task, batches, mesh_config, **options):
  """Returns the metrics of steps on these batches, and the last state."""
  mesh = make_mesh(mesh_config)
  abstract, state = start(task, mesh)
  step = jax.jit(
    functools.partial(train_step, task=task, optimizer=OPTIMIZER, **options),
    out_shardings=(jax.tree.map(lambda x: x.sharding, abstract), None),
  )
  told = []
  with jax.set_mesh(mesh):
    for batch in batches:
      state, metric_sums = step(state, parallel.put_batch(batch, mesh))
      told.append(metrics_lib.finalize(metric_sums))
  return told, state


@functools.cache
def run(mesh_config, scan_layers=False, grad_accum_steps=1):
  """Trains a few steps; returns metrics by step and the last state."""
  return take_steps(
    *(make_task(scan_layers), make_batches(), mesh_config),
    static_args=0.0,
    grad_accum_steps=grad_accum_steps,
  )


RUNS = pytest.mark.parametrize(
  ('mesh', 'scan_layers', 'grad_accum_steps'),
  [
    ('tensor 4', False, 1),
    pytest.param('mixed', True, 2, marks=pytest.mark.slow),
  ],
)


@RUNS
def test_losses_equal_those_of_one_device(mesh, scan_layers, grad_accum_steps):
  told, state = run(MESHES[mesh], scan_layers, grad_accum_steps)
  expected, expected_state = run(None, scan_layers)
  losses = [values['loss'] for values in expected]
  assert abs(losses[0] - losses[-1]) > 0.01  # The steps do something.
  for values, wanted in zip(told, expected, strict=True):
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
      # An accuracy may count one token of 256 otherwise.
      atol = 0.005 if name.endswith('accuracy') else 1e-4
      np.testing.assert_allclose(
        values[name], value, rtol=1e-5, atol=atol, err_msg=name
      )
  chex.assert_trees_all_close(
    jax.device_get(state.params),
    jax.device_get(expected_state.params),
    atol=1e-4,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('path', 'variant', 'changes'),
  [
    # The mesh does not divide 257 tokens.
    ('vlm/scenes', 'pmod_tiny', {'model.language.vocab_size': 258}),
    ('detection/scenes', 'mod_tiny', {}),
    ('vit/digits', 'experts_tiny', {}),
    ('vit/digits', 'dynamic_tiny', {}),
    ('speech/words', 'tiny', {}),
  ],
)
def test_a_step_of_any_model_is_that_of_one_device(
  path, variant, changes, load_config_file
):
  config = load_config_file(f'configs/{path}.py', variant)
  changes = {'train.batch_size': 8, 'init': None} | changes
  task = tasks.make_task(config_lib.replace(config, changes))
  batch = next(task.modality.train_iterator(shard_index=0, shard_count=1))
  (told, state), (expected, expected_state) = (
    take_steps(task, [batch], mesh, static_args=task.static_args(0))
    for mesh in (MESHES['mixed'], None)
  )
  chex.assert_trees_all_close(told, expected, rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_close(
    jax.device_get(state.params),
    jax.device_get(expected_state.params),
    atol=1e-5,
  )


SHARES = {
  # By mesh: how many parts of the axes called embed, and of heads, mlp, vocab.
  'tensor 4': (1, 4),
  'mixed': (2, 2),
}


def expected_shards(mesh, scan_layers):
  f, t = SHARES[mesh]
  shapes = {
    'embedding': (V // t, D // f),
    'block_0/mlp/up/kernel': (D // f, F // t),
    'block_0/mlp/gate/kernel': (D // f, F // t),
    'block_1/mlp/down/kernel': (F // t, D // f),
    'block_0/attention/query/kernel': (D // f, H // t, C),
    'block_1/attention/key/kernel': (D // f, H // t, C),
    'block_1/attention/out/kernel': (H // t, C, D // f),
    # Small, and everywhere: routing needs no communication.
    'block_1/router/kernel': (D,),
    'block_1/predictor/hidden/kernel': (D, 8),
    'block_0/mlp_norm/scale': (D,),
    'norm/scale': (D,),
  }
  if not scan_layers:
    return shapes
  return {
    f'layers/{name}' if name.startswith('block') else name: (
      (2, *shape) if name.startswith('block') else shape
    )
    for name, shape in shapes.items()
  }


def shard_shapes(tree):
  flat = flax.traverse_util.flatten_dict(tree)
  shapes = {}
  for path, leaf in flat.items():
    held = {shard.data.shape for shard in leaf.addressable_shards}
    assert len(leaf.addressable_shards) == 8
    assert len(held) == 1
    shapes['/'.join(path)] = held.pop()
  return shapes


def moments(state):
  """Returns Adam's two trees."""
  (adam,) = [s for s in state.opt_state if hasattr(s, 'mu')]
  return adam.mu, adam.nu


@RUNS
def test_parameters_and_moments_are_sharded(
  mesh, scan_layers, grad_accum_steps
):
  _, state = run(MESHES[mesh], scan_layers, grad_accum_steps)
  expected = expected_shards(mesh, scan_layers)
  assert shard_shapes(state.params).items() >= expected.items()
  for tree in moments(state):
    assert shard_shapes(tree) == shard_shapes(state.params)
  kernel = state.params['layers'] if scan_layers else state.params
  kernel = kernel['block_0']['mlp']['up']['kernel']
  distinct = {str(s.index) for s in kernel.addressable_shards}
  assert len(distinct) == np.prod(SHARES[mesh])


def test_born_sharded_and_the_same_on_any_mesh(monkeypatch):
  mesh = 'mixed'
  told = []
  jit = jax.jit

  def spy(f, **kwargs):
    told.append(kwargs)
    return jit(f, **kwargs)

  monkeypatch.setattr(state_lib.jax, 'jit', spy)
  abstract, state = start(make_task(), make_mesh(MESHES[mesh]))
  # Never whole on one device: the program that makes it puts it in place.
  wanted = jax.tree.leaves(told[0]['out_shardings'])
  leaves = jax.tree.leaves(state)
  assert len(wanted) == len(leaves)
  for sharding, leaf in zip(wanted, leaves, strict=True):
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  assert (
    shard_shapes(state.params).items() >= expected_shards(mesh, False).items()
  )
  monkeypatch.undo()
  _, alone = start(make_task(), make_mesh(None))
  for a, b in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert jax.tree.map(lambda x: x.shape, abstract.params) == jax.tree.map(
    lambda x: x.shape, alone.params
  )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model.mlp_dim': 30, 'mesh.tensor': 4}, "Axis 'mlp' .* size 30"),
    (
      {'train.grad_accum_steps': 4},
      'grad_accum_steps=4 does not divide by the 8',
    ),
  ],
)
def test_what_does_not_divide_is_refused(texts, tmp_path, changes, message):
  config = make_config(texts, **changes)
  with pytest.raises(UserError, match=message):
    phases.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def make_config(texts, **changes):
  config = tiny_runs.make_config(texts, **{'train.batch_size': 16})
  config = dataclasses.replace(config, model=make_task().config.model)
  return config_lib.replace(config, changes)


@pytest.mark.parametrize(
  ('changes', 'devices'),
  [
    ({'mesh.data': 2, 'mesh.fsdp': 4, 'evaluation.batch_size': 16}, (2, 4)),
    ({'mesh.data': 32, 'evaluation.batch_size': 32}, (8, 1)),
    ({'evaluation.batch_size': 12}, (4, 1)),
    ({'evaluation.batch_size': 3}, (1, 1)),
  ],
)
def test_held_out_batches_divide_by_whatever_devices_are_there(
  changes, devices
):
  mesh = mesh_of(tiny.experiment(**changes))
  assert tuple(mesh.shape.values()) == (*devices, 1, 1)


@pytest.mark.slow
def test_a_whole_run_on_a_mixed_mesh(texts, tmp_path):
  routing = MoDConfig(capacity=0.25, period=1, offset=0, router_loss=0.1)
  changes = {
    'mesh.fsdp': 2,
    'mesh.tensor': 2,
    'model.num_layers': 1,
    'model.routing': routing,
    'evaluation.sample_tokens': 4,
  }
  config = make_config(texts, **changes)
  phases.train(config, tmp_path / 'run', max_steps=2)
  # Saved sharded, restored sharded.
  result = phases.train(config, tmp_path / 'run')
  assert result.finished
  shards = shard_shapes(result.state.params)
  assert shards['block_0/mlp/up/kernel'] == (D // 2, F // 2)
  # One row does not divide over the devices, and is sampled all the same.
  sample = (tmp_path / 'run' / 'sample_0.txt').read_text(errors='replace')
  words = tasks.make_task(config).modality._held_out_words()
  assert sample.startswith(words)
  # One device finds the same held-out losses.
  state = jax.device_get(result.state.params)
  alone = held_out(
    tasks.make_task(config), state, {}, make_mesh(None), batches=1
  )
  assert alone.keys() == result.metrics.keys()
  for rule in ('top_k', 'router'):
    assert result.metrics[f'{rule}/loss'] == pytest.approx(
      alone[f'{rule}/loss'], abs=1e-4
    )
