"""Runs compiled for slices that are not here, and what need not be compiled."""

import csv
import dataclasses
import importlib.util
import json
import shutil
import types

import jax
import jax.numpy as jnp
import pytest

from mod_jax import config as config_lib
from mod_jax import flops, parallel
from mod_jax.errors import UserError
from mod_jax.prove import hlo, prove, slices
from mod_jax.sweeps import manifest
from mod_jax.tasks import make_task

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason='libtpu, the TPU compiler, is not installed: pip install libtpu',
)


@pytest.fixture(scope='module')
def tiny(load_config_file):
  """As small as a model can be that is scanned, routed and rematerialised."""
  config = load_config_file('configs/lm/paper.py', 'tiny')
  sizes = {'model.num_layers': 4, 'model.width': 16, 'data.length': 16}
  return config_lib.replace(config, {'model.remat': 'full'} | sizes)


@pytest.mark.parametrize(
  ('chips', 'rows', 'mesh', 'fitted'),
  [
    (64, 128, {'fsdp': 4}, (16, 4, 1, 1)),
    (256, 128, {'fsdp': 4}, (32, 4, 1, 2)),  # 128 rows on 256 chips.
    (256, 128, {'fsdp': 4, 'tensor': 4}, (16, 4, 1, 4)),
    (64, 128, {'fsdp': 16, 'expert': 8}, (1, 8, 8, 1)),
    (8, 128, {'fsdp': 16}, (1, 8, 1, 1)),
    (8, 128, {'data': 2, 'fsdp': 4}, (2, 4, 1, 1)),  # No axis is open.
  ],
)
def test_a_mesh_is_changed_as_little_as_the_chips_need(
  chips, rows, mesh, fitted
):
  found = parallel.fit_mesh(parallel.MeshConfig(**mesh), chips, rows)
  assert found.sizes(chips) == fitted


def test_frozen_parameters_are_of_the_model(tiny):
  rules = (('router', 1.0, 0), ('.', 0.0, 0))
  frozen = {'optimizer.rules': rules, 'train.frozen': 'bfloat16'}
  (topology,) = slices.parse('v5e:2x2')
  whole, part = (
    prove.check(config_lib.replace(tiny, changes), topology)
    for changes in ({}, frozen)
  )
  assert whole.parameters == part.parameters
  assert whole.memory > part.memory


@needs_libtpu
def test_a_mesh_need_not_have_the_axes_of_the_slice():
  (cube,) = slices.parse('v5p:4x4x4')
  mesh = parallel.make_mesh(parallel.MeshConfig(fsdp=8), cube.devices())
  assert mesh.devices.shape == (8, 8, 1, 1)
  assert len(set(mesh.devices.flat)) == 64


class TestRefusals:
  """One sentence each, and nothing is compiled."""

  @pytest.fixture(autouse=True)
  def nothing_compiles(self, monkeypatch):
    monkeypatch.setattr(prove, 'lower', None)

  @pytest.mark.parametrize(
    ('changes', 'topology', 'message'),
    [
      ({'mesh.fsdp': 3}, 'v5e:2x2', r"'fsdp': 3.* 4 device\(s\)"),
      ({'mesh.tensor': 4}, 'v5e:2x2', "Axis 'heads'"),
      (
        {'train.batch_size': 128},
        'v5e:16x16',
        'grad_accum_steps=128 .*256 devices.* a larger mesh.tensor',
      ),
    ],
  )
  def test_a_run_that_does_not_suit_the_slice(
    self, tiny, changes, topology, message
  ):
    config = config_lib.replace(tiny, changes)
    with pytest.raises(UserError, match=message):
      prove.report(config, topology)

  def test_a_step_with_a_teacher(self, load_config_file):
    with pytest.raises(UserError, match='teacher'):
      prove.report(load_config_file('configs/vit/dynamic.py', 'tiny'), 'v5e')

  @pytest.mark.parametrize(
    ('topology', 'package'), [('v5e:2x2', 'libtpu'), ('h100:4', 'mod_jax.gpu')]
  )
  def test_without_the_compiler(self, topology, package, tiny, monkeypatch):
    monkeypatch.setattr(slices.Gpu, 'compilers', ('no-such-package',))
    monkeypatch.setattr(slices.Tpu, 'compilers', ('no-such-package',))
    with pytest.raises(UserError, match=f"pip install '{package}"):
      prove.report(tiny, topology)

  def test_all_runs_are_looked_at_before_one_is_compiled(self, tiny, tmp_path):
    wrong = config_lib.replace(tiny, {'mesh.data': 3})
    runs = [('right', tiny), ('wrong', wrong)]
    with pytest.raises(UserError, match="'data': 3"):
      prove.run(runs, ['v5e:2x2'], tmp_path)
    assert not list(tmp_path.iterdir())

  def test_models_that_are_too_large_for_every_slice(
    self, tiny, monkeypatch, tmp_path
  ):
    chip = dataclasses.replace(
      slices.CHIPS['v5e'], memory=2**20, slices=('2x2', '2x4')
    )
    monkeypatch.setitem(slices.CHIPS, 'v5e', chip)
    config = config_lib.replace(
      tiny, {'model.width': 256, 'mesh.fsdp': 4, 'train.batch_size': 8}
    )
    with pytest.raises(UserError, match='2 of 2 do not fit: one on v5e:2x4'):
      prove.run([('one', config), ('two', config)], ['v5e'], tmp_path)
    with open(tmp_path / 'prove.csv', newline='') as file:
      rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for row in rows:
      assert (row['fits'], row['dense_fits']) == ('False', 'False')
      assert row['bound'] == 'memory'
      # A twin that does not fit is not one that takes no time.
      assert row['dense_step_seconds'] == row['dense_products'] == ''
    assert 'DOES NOT FIT' in prove.report(config, 'v5e')


@needs_libtpu
@pytest.mark.parametrize('refuses', [True, False])
def test_what_does_not_fit_is_compiled_as_a_run_would(
  tiny, monkeypatch, refuses
):
  """Whether the compiler says so or its program, compiled quickly."""
  levels = []

  def compile():
    levels.append(jax.config.jax_optimization_level)
    if refuses:
      used = 21 - 4 * len(levels)
      raise jax.errors.JaxRuntimeError(
        f'RESOURCE_EXHAUSTED: Used {used}.50G of 15.75G hbm'
      )
    names = ('argument', 'output', 'alias', 'temp', 'generated_code')
    sizes = {f'{name}_size_in_bytes': 0 for name in names}
    sizes['temp_size_in_bytes'] = (10**12, 10**9)[len(levels) - 1]
    program = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    return types.SimpleNamespace(
      memory_analysis=lambda: types.SimpleNamespace(**sizes),
      as_text=program.as_text,
    )

  lowered = types.SimpleNamespace(compile=compile)
  monkeypatch.setattr(prove, 'lower', lambda *args: lowered)
  (topology,) = slices.parse('v5e:2x2')
  proof = prove.prove(tiny, topology)
  assert levels[0] == 'O1' != levels[1] == jax.config.jax_optimization_level
  assert proof.fits != refuses
  assert proof.memory == (13.5 * 2**30 if refuses else 10**9)


@pytest.mark.parametrize('kind', ['text', 'speech'])
def test_batches_have_the_shapes_that_are_told(tiny, load_config_file, kind):
  """Those of speech at most."""
  config = config_lib.replace(tiny, {'data.segments': True})
  if kind == 'speech':
    config = load_config_file('configs/speech/words.py', 'tiny')
  modality = make_task(config).modality
  told = modality.batch_shapes()
  batches = modality.train_iterator(shard_index=0, shard_count=1)
  key = 'wave' if kind == 'speech' else 'tokens'
  largest = max((next(batches) for _ in range(4)), key=lambda x: x[key].size)
  if kind == 'speech':
    assert largest.pop('labels').shape <= told.pop('labels').shape
  assert {k: (x.shape, x.dtype) for k, x in largest.items()} == {
    k: (x.shape, x.dtype) for k, x in told.items()
  }


@needs_libtpu
def test_the_last_phase_of_an_adaptive_model(load_config_file, tmp_path):
  config = load_config_file('configs/speech/words.py', 'acm_tiny')
  phase = {'objective.end_to_end.batch_size': 4}
  config = config_lib.replace(config, phase)
  (row,) = prove.run([('acm', config)], ['v5e:2x2'], tmp_path)
  assert row['fits']
  assert row['dense_fits']
  # The phase has a batch of its own.
  length = config.model.frames(config.data.samples[-1])
  assert row['model_flops'] == 4 * flops.train(config.model, length)


@pytest.fixture(scope='module')
def proven(tiny, tmp_path_factory):
  """A manifest of a run, dense and MoD, on two kinds of chips."""
  workdir = tmp_path_factory.mktemp('sweep')
  dense = config_lib.replace(tiny, {'model.routing': None, 'seed': 3})
  topologies = ['v5e:2x2', 'v5p']
  rows = prove.run([('mod', tiny), ('dense', dense)], topologies, workdir)
  return workdir, rows


@needs_libtpu
@pytest.mark.slow
class TestProven:
  def test_a_line_for_each_run_on_each_slice(self, proven):
    workdir, rows = proven
    with open(workdir / 'prove.csv', newline='') as file:
      read = list(csv.DictReader(file))
    # The smallest of v5p.
    assert [(row['topology'], row['id']) for row in read] == [
      (x, y) for x in ('v5e:2x2', 'v5p:2x2x1') for y in ('mod', 'dense')
    ]
    assert [float(row['products']) for row in read] == [
      row['products'] for row in rows
    ]
    for row in read:
      assert row['fits'] == 'True'
      assert 0 < int(row['memory']) < 2**30
      assert json.loads(row['collectives'])['all-reduce'][0] >= 1
      assert not row['uncounted']

  def test_the_dense_twin_stands_beside(self, proven):
    _, rows = proven
    for routed, dense in zip(rows[::2], rows[1::2], strict=True):
      for name in ('products', 'sent', 'step_seconds'):
        assert routed[f'dense_{name}'] == dense[name]
        assert dense[f'dense_{name}'] == ''
      assert routed['products'] < dense['products']

  def test_what_was_compiled_is_not_compiled_again(
    self, proven, tiny, monkeypatch
  ):
    workdir, rows = proven
    monkeypatch.setattr(prove, 'lower', None)
    changes = {'seed': 7, 'name': 'another', 'train.num_steps': 99}
    other = config_lib.replace(tiny, changes)
    assert prove.run([('again', other)], ['v5e:2x2'], workdir) == [
      rows[0] | {'id': 'again'}
    ]

  def test_on_the_command_line(
    self, proven, tiny, monkeypatch, tmp_path, command
  ):
    workdir, rows = proven
    monkeypatch.setattr(prove, 'lower', None)
    entry = manifest.Entry(
      id='one', group='mod', budget=1e9, seed=0, config=tiny, facts={}
    )
    manifest.write(tmp_path, [entry])
    shutil.copytree(workdir / 'prove', tmp_path / 'prove')
    status, out, _ = command(
      'prove', f'--workdir={tmp_path}', '--topology=v5e:2x2,v5p'
    )
    assert status == 0
    _, first, second = out.splitlines()
    assert first.split()[:2] == ['one', 'v5e:2x2']
    assert f'{rows[0]["products"]:.3e}' in first
    assert second.split()[:2] == ['one', 'v5p:2x2x1']


class TestKernels:
  """Splash attention by formula: 2 rows, 3 heads, 5 channels, 8 tokens."""

  one = 2 * 2 * 3 * 5  # FLOPs of a pair in one product.

  def kernel(self, name, count, blocks=4, rows=2):
    mask = ('s8', (1, blocks, blocks))
    # A single row has no axis for rows.
    array = ('bf16', (2, 3, 8, 5) if rows == 2 else (3, 8, 5))
    return hlo.Kernel(name, (mask, mask, array, array, array), count)

  def found(self, *kernels):
    useful, again, others = prove.kernel_flops(kernels)
    assert not others
    return useful / self.one, again / self.one

  def test_forward_counts_causal_pairs_and_runs_blocks(self):
    name = 'splash_mha_fwd_residuals'
    # 36 of 64 pairs; of 4 x 4 blocks of 4 pairs, 10; or all in one block.
    assert self.found(self.kernel(name, 6)) == (6 * 2 * 36, 6 * 2 * (40 - 36))
    assert self.found(self.kernel(name, 1, blocks=1)) == (2 * 36, 2 * (64 - 36))
    assert self.found(self.kernel(name, 2, rows=1)) == (2 * 36, 2 * (40 - 36))
    # Without a mask all pairs count.
    kernel = hlo.Kernel(name, (('f32', (2, 3, 8, 5)),) * 3)
    assert self.found(kernel) == (2 * 64, 0)

  def test_backward_is_twice_forward_and_more_is_computed_again(self):
    useful, again = self.found(
      self.kernel('splash_mha_fwd_residuals', 3),
      self.kernel('splash_mha_fwd_residuals', 3),  # Rematerialised.
      self.kernel('splash_mha_dq_no_residuals', 3),
      self.kernel('splash_mha_dkv_no_residuals', 3),
    )
    assert useful == 3 * 36 * (2 + 4)
    assert useful + again == 3 * 40 * (2 + 2 + 3 + 4)

  def test_cudnn(self):
    # It takes heads behind tokens, and here 4 keys.
    queries, keys = (('bf16', (2, n, 3, 5)) for n in (8, 4))
    name = 'dot_product_attention_'
    forward = hlo.Kernel(f'{name}fwd', (queries, keys, keys), 2)
    assert self.found(forward) == (2 * 2 * 32, 0)
    again = hlo.Kernel(f'{name}fwd', (queries,) * 3, 2, causal=True)
    backward = hlo.Kernel(f'{name}bwd', (queries,) * 6, 1, causal=True)
    useful, more = self.found(again, backward)
    assert useful == 36 * (2 + 4)
    assert useful + more == 36 * (2 * 2 + 5)

  def test_other_kernels_are_named(self):
    kernel = hlo.Kernel('route_scores', (('f32', (4, 4)),))
    assert prove.kernel_flops([kernel, kernel]) == (0, 0, ('route_scores',))
