"""Checkpoints: bit exact, whole or absent, and never silently damaged."""

import collections
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
import unittest.mock

import flax.struct
import grain
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import tiny

from mod_jax import parallel
from mod_jax.errors import UserError
from mod_jax.parallel import MeshConfig
from mod_jax.runs import checkpoints, checksums
from mod_jax.runs.checkpoints import CheckpointConfig, Checkpointer


@flax.struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: optax.OptState
  rng: jax.Array
  model_state: dict


def make_state(seed, width=6):
  rng = np.random.default_rng(seed)
  params = {
    'embed': {'kernel': jnp.asarray(rng.normal(size=(8, width)), jnp.float32)},
    'head': jnp.asarray(rng.normal(size=(width, 8)), jnp.bfloat16),
  }
  optimiser = optax.adamw(1e-3)
  opt_state = optimiser.init(params)
  _, opt_state = optimiser.update(params, opt_state, params)
  return State(
    step=jnp.asarray(seed, jnp.int32),
    params=params,
    opt_state=opt_state,
    rng=jax.random.key(seed),
    model_state={'seen': jnp.asarray(rng.integers(0, 9, 3), jnp.int8)},
  )


def abstract(state):
  return jax.eval_shape(lambda: state)


def make_iterator():
  data = grain.MapDataset.range(1000).shuffle(seed=3).repeat().batch(2)
  return iter(data.to_iter_dataset())


def save_steps(directory, steps, **config):
  iterator = make_iterator()
  with Checkpointer(directory, CheckpointConfig(**config)) as checkpointer:
    for step in steps:
      next(iterator)
      checkpointer.save(step, make_state(step), iterator, {'saved': step})


@contextlib.contextmanager
def warnings():
  """Yields a list that takes the warnings instead of the log."""
  messages = []

  def warning(form, *args):
    messages.append(form % args)

  with unittest.mock.patch.object(checkpoints.logging, 'warning', warning):
    yield messages


def restore(directory, iterator=None):
  """Returns the newest usable checkpoint and the warnings."""
  with (
    warnings() as said,
    Checkpointer(directory, CheckpointConfig()) as checkpointer,
  ):
    return checkpointer.restore(abstract(make_state(0)), iterator), said


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
  """A directory with checkpoints at steps 1 and 2; copy it to change it."""
  directory = tmp_path_factory.mktemp('template')
  save_steps(directory, [1, 2])
  return directory


@pytest.fixture
def copy(two_steps, tmp_path):
  shutil.copytree(two_steps, tmp_path / 'checkpoints')
  return tmp_path / 'checkpoints'


def test_round_trip_is_bit_exact(tmp_path):
  iterator = make_iterator()
  next(iterator)
  state = make_state(7)
  state = state.replace(
    model_state={
      **state.model_state,
      'odd': jnp.array([np.nan, -0.0, np.inf, 1e-45], jnp.float32),
      'rbg': jax.random.split(jax.random.key(1, impl='rbg'), 3),
    }
  )
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    checkpointer.save(7, state, iterator, {'config': {'width': 6}})
    expected = [next(iterator) for _ in range(5)]
  fresh = make_iterator()
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    restored = checkpointer.restore(abstract(state), fresh)
  assert restored.step == 7
  assert restored.metadata == {'config': {'width': 6}}
  tiny.same_bits(restored.state, state)
  np.testing.assert_array_equal([next(fresh) for _ in range(5)], expected)
  assert not np.array_equal(next(make_iterator()), expected[0])


def test_state_may_be_donated_and_data_may_go_on(tmp_path):
  mesh = parallel.make_mesh(MeshConfig())
  expected = np.arange(2**20, dtype=np.float32)
  state = {'x': jax.device_put(expected, NamedSharding(mesh, P('data')))}
  overwrite = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0
  )
  iterator = make_iterator()
  metadata = {'a': 1}
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    checkpointer.save(1, state, iterator, metadata)
    metadata['a'] = 2
    for _ in range(5):
      state = overwrite(state)
      next(iterator)
    jax.block_until_ready(state)
  fresh = make_iterator()
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    restored = checkpointer.restore(abstract(state), fresh)
  np.testing.assert_array_equal(restored.state['x'], expected)
  np.testing.assert_array_equal(next(fresh), next(make_iterator()))
  assert restored.metadata == {'a': 1}


def test_keeps_the_newest_and_the_first_of_each_step(tmp_path):
  save_steps(tmp_path, [1, 2, 3, 4, 5], keep=2)
  with Checkpointer(tmp_path, CheckpointConfig(keep=2)) as checkpointer:
    assert checkpointer.steps() == [4, 5]
    checkpointer.save(5, make_state(6))
    checkpointer.wait()
    restored = checkpointer.restore(abstract(make_state(0)))
    tiny.same_bits(restored.state, make_state(5))
  assert {path.name for path in tmp_path.iterdir()} == {'4', '5'}


def test_an_error_in_the_background_is_raised(tmp_path, monkeypatch):
  def fail(*_):
    raise OSError('no space left on device')

  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    checkpointer.save(1, make_state(1))
    checkpointer.wait()
    with monkeypatch.context() as patch:
      patch.setattr(checksums, '_digests', fail)
      checkpointer.save(2, make_state(2))
      with pytest.raises(OSError, match='no space'):
        checkpointer.wait()
    assert checkpointer.steps() == [1]
    checkpointer.save(3, make_state(3))
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


def test_after_a_failed_save_nothing_is_left_running(tmp_path, monkeypatch):
  late = []
  monkeypatch.setattr(sys, 'unraisablehook', late.append)
  # As a full disk does it, without one: no file may have more than 200 KB.
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  rng = np.random.default_rng(0)
  arrays = {str(i): jnp.array(rng.normal(size=1000)) for i in range(300)}
  # Small arrays may come to lie in several files, but one never does.
  arrays['large'] = jnp.array(rng.normal(size=100_000))
  resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
  try:
    for attempt in range(3):
      checkpointer = Checkpointer(tmp_path / str(attempt), CheckpointConfig())
      checkpointer.save(1, arrays)
      with pytest.raises(ValueError, match='File too large'):
        checkpointer.close()
    time.sleep(0.1)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not late


def largest(directory):
  files = [path for path in directory.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def array_file(step):
  return largest(step / 'state' / 'ocdbt.process_0' / 'd')


# The many kinds of damage are in test_damage.py.
def test_the_one_before_is_used_and_the_run_goes_on(copy):
  tiny.flip(array_file(copy / '2'))
  state, iterator = abstract(make_state(0)), make_iterator()
  with Checkpointer(copy, CheckpointConfig(keep=2)) as checkpointer:
    with warnings() as said:
      restored = checkpointer.restore(state, iterator)
    assert restored.step == 1
    assert restored.metadata == {'saved': 1}
    tiny.same_bits(restored.state, make_state(1))
    expected = make_iterator()
    next(expected)
    np.testing.assert_array_equal(next(iterator), next(expected))
    (sentence,) = said
    assert 'step 2' in sentence
    assert 'using the one at step 1 instead' in sentence
    # Nothing is lost, and the step is free again.
    assert sorted(os.listdir(copy)) == ['1', '2.corrupt']
    for step in (2, 3):
      checkpointer.save(step, make_state(step), iterator)
      checkpointer.wait()
    assert checkpointer.steps() == [2, 3]
    restored = checkpointer.restore(state)
  tiny.same_bits(restored.state, make_state(3))
  restored, said = restore(copy, iterator)
  assert (restored.step, said) == (3, [])


def test_none_usable_is_an_error_each_time(copy):
  for step in ('1', '2'):
    tiny.flip(array_file(copy / step))
  for _ in range(2):  # A second start must not find an empty directory.
    with pytest.raises(UserError, match='no checkpoint in .* is usable') as e:
      restore(copy)
    assert 'step 2' in str(e.value)
    assert 'step 1' in str(e.value)
  with pytest.raises(UserError, match='no checkpoint in .* is usable') as e:
    checkpoints.restore_subtree(copy, {}, step=2)
  assert 'step 1' not in str(e.value)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (
      {'params': make_state(0, width=4).params},
      r'params/embed/kernel.*\(8, 6\).*\(8, 4\)',
    ),
    (
      {'params': make_state(0).params | {'router': jnp.zeros(3)}},
      r'params/router is missing.*float32\(3,\)',
    ),
    ({'model_state': {}}, r'seen is int8\(3,\).*missing in this model'),
    ({'step': jnp.zeros((), jnp.float32)}, 'step.*int32.*float32'),
  ],
  ids=['shape', 'missing', 'extra', 'dtype'],
)
def test_another_model_is_an_error_and_no_damage(copy, change, words):
  with (
    warnings() as said,
    Checkpointer(copy, CheckpointConfig()) as checkpointer,
    pytest.raises(UserError, match=words) as e,
  ):
    checkpointer.restore(abstract(make_state(0).replace(**change)))
  assert '\n' not in str(e.value)
  assert said == []
  assert restore(copy)[0].step == 2


@pytest.mark.parametrize(
  'iterator', [None, types.SimpleNamespace(get_state=lambda: {'a': 1})]
)
def test_another_kind_of_data_is_an_error_and_no_damage(tmp_path, iterator):
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    checkpointer.save(2, make_state(2), iterator)
  with pytest.raises(UserError, match='no data position that fits'):
    restore(tmp_path, make_iterator())
  assert restore(tmp_path)[0].step == 2


def test_restores_onto_another_mesh(tmp_path):
  assert jax.device_count() == 8
  x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  before = parallel.make_mesh(MeshConfig())
  config = MeshConfig(data=1, fsdp=2, tensor=2)
  after = parallel.make_mesh(config, jax.devices()[:4])
  state = {
    'x': jax.device_put(x, NamedSharding(before, P('data'))),
    'rng': jax.device_put(jax.random.key(3), NamedSharding(before, P())),
  }
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    checkpointer.save(1, state)
  wanted = {
    'x': NamedSharding(after, P('tensor', 'fsdp')),
    'rng': NamedSharding(after, P()),
  }
  target = jax.tree.map(
    lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
    state,
    wanted,
  )
  with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
    restored = checkpointer.restore(target).state
  tiny.same_bits(restored, state)
  for name, leaf in restored.items():
    assert leaf.sharding.is_equivalent_to(wanted[name], leaf.ndim)
  assert restored['x'].addressable_shards[0].data.shape == (8, 4)


def test_part_of_a_checkpoint(copy):
  before = sorted(copy.rglob('*'))
  state = make_state(2)
  wanted = abstract(state).replace(opt_state=None, rng=None, step=None)
  restored = checkpoints.restore_subtree(copy, wanted)
  assert restored.step == 2
  assert restored.metadata == {'saved': 2}
  tiny.same_bits(restored.state.params, state.params)
  tiny.same_bits(restored.state.model_state, state.model_state)
  assert restored.state.opt_state is None

  by_name = checkpoints.restore_subtree(
    copy, {'params': abstract(state).params}, step=1
  )
  tiny.same_bits(by_name.state, {'params': make_state(1).params})
  assert sorted(copy.rglob('*')) == before


@pytest.mark.parametrize('step', [None, 1])
def test_part_of_a_checkpoint_that_a_run_deletes_meanwhile(tmp_path, step):
  save_steps(tmp_path, [1])
  seen = []

  def meanwhile(saved):
    seen.append(saved.step)
    if saved.step == 1:
      save_steps(tmp_path, [2], keep=1)

  def read():
    wanted = {'params': abstract(make_state(0)).params}
    return checkpoints.restore_subtree(
      tmp_path, wanted, step=step, check=meanwhile
    )

  if step is None:
    tiny.same_bits(read().state, {'params': make_state(2).params})
    assert seen == [1, 2]
  else:
    with pytest.raises(UserError, match=r'step 1 .*expected one of \[2\]'):
      read()


# Saves one checkpoint after the other until it is killed: by itself at a named
# point, or by its parent after a while. One process imports everything and
# forks the victims, before any thread or device exists.
_VICTIMS = """
import os, pathlib, signal, sys, time
import jax.numpy as jnp
from mod_jax.runs import checkpoints
from mod_jax.runs import checksums

def die():
  os.kill(os.getpid(), signal.SIGKILL)

def die_at_call(owner, name, when):
  original, calls = getattr(owner, name), []
  def wrapped(*args, **kwargs):
    calls.append(args)
    if when(len(calls), *args):
      die()
    return original(*args, **kwargs)
  setattr(owner, name, wrapped)

def victim(directory, plan):
  config = checkpoints.CheckpointConfig(keep=2)
  checkpointer = checkpoints.Checkpointer(directory, config)
  checkpointer.save(1, {'x': jnp.full(9999, 1)})
  checkpointer.wait()
  pathlib.Path(directory, 'ready').touch()
  kind, _, value = plan.partition(':')
  if kind == 'rename':
    for name in ('rename', 'replace'):
      die_at_call(os, name, lambda n, *_: n == int(value))
  elif kind == 'manifest':
    die_at_call(checksums, '_digests', lambda n, *_: n == 4)
  elif kind == 'delete':
    die_at_call(os, 'unlink', lambda n, *_: n == int(value))
  for step in range(2, 10**6):
    checkpointer.save(step, {'x': jnp.full(9999, step)})

root, *plans = sys.argv[1:]
for plan in plans:
  directory = os.path.join(root, plan.replace(':', '_'))
  os.mkdir(directory)
  pid = os.fork()
  if not pid:
    try:
      victim(directory, plan)
    finally:
      os._exit(1)
  if plan.startswith('time'):
    while not os.path.exists(os.path.join(directory, 'ready')):
      time.sleep(0.01)
    time.sleep(float(plan.split(':')[1]))
    os.kill(pid, signal.SIGKILL)
  _, status = os.waitpid(pid, 0)
  print(plan, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 'exit')
"""


def test_killed_at_any_moment_leaves_whole_checkpoints(tmp_path):
  plans = ['manifest', 'rename:1', 'rename:4', 'delete:1', 'time:0.19']
  result = subprocess.run(
    [sys.executable, '-c', _VICTIMS, tmp_path, *plans],
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  expected = [f'{plan} {int(signal.SIGKILL)}' for plan in plans]
  assert result.stdout.splitlines() == expected, result.stderr[-2000:]
  left = collections.Counter()
  for plan in plans:
    directory = tmp_path / plan.replace(':', '_')
    left.update(path.name.strip('0123456789') for path in directory.iterdir())
    with (
      warnings() as said,
      Checkpointer(directory, CheckpointConfig(keep=2)) as checkpointer,
    ):
      steps = checkpointer.steps()
      assert steps
      for step in steps:  # Visible means whole.
        part = checkpoints.restore_subtree(
          directory, {'x': jax.ShapeDtypeStruct((9999,), jnp.int32)}, step=step
        )
        np.testing.assert_array_equal(part.state['x'], np.full(9999, step))
      restored = checkpointer.restore(part.state)
      assert (restored.step, said) == (steps[-1], [])
      checkpointer.save(steps[-1] + 1, part.state)
    deadline = time.time() + 60
    while (names := os.listdir(directory)) and time.time() < deadline:
      if not any('tmp' in name or name == 'deleted' for name in names):
        break
      time.sleep(0.05)
    assert sorted(set(names) - {'ready'}) == sorted(
      map(str, [*steps, steps[-1] + 1][-2:])
    )
  # Otherwise no victim was caught in the act.
  assert left['.orbax-checkpoint-tmp']
