"""Real programs compile for TPUs that are not here: libtpu alone does it."""

import dataclasses
import functools
import importlib.util
import math
import os
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax import parallel
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.acm import FFNS
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routed import VisionRoutingConfig
from mod_jax.models import lm
from mod_jax.models.vit import ViTConfig
from mod_jax.tasks import make_task
from mod_jax.train import optimizer as optimizer_lib
from mod_jax.train import state as state_lib
from mod_jax.train.step import train_step

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('quick_tpu'),
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='libtpu, the TPU compiler, is not installed: pip install libtpu',
  ),
]

_COLLECTIVE = re.compile(
  r' (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)'
  r'(?:-start)?\('
)


@pytest.fixture(scope='module')
def devices(quick_tpu):
  """Sixteen TPU v5e chips, to compile for."""
  del quick_tpu  # Before anything compiles.
  # Set here and not globally: they only matter to libtpu.
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='tpu', topology_name='v5e:4x4'
  )
  return topology.devices


@pytest.fixture(scope='module')
def experiment(load_config_file):
  """The 220M model of the paper's config; its tokenizer is a user's file."""
  config = load_config_file('configs/lm/paper.py', '220m')
  return config_lib.replace(
    config,
    {
      'data': TextDataConfig(length=2048),
      'train.batch_size': 32,
      # What a process on a TPU chooses by itself.
      'model.attention': 'splash',
    },
  )


def abstract_batch(config, sharding):
  shape = (config.train.batch_size, config.data.length)
  dtypes = {'tokens': 'int32', 'targets': 'int32', 'weights': 'float32'}
  return {
    name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    for name, dtype in dtypes.items()
  }


@pytest.fixture(scope='module')
def compiled_step(devices, experiment):
  """The training step as the loop builds it, compiled for 16 chips."""
  task = make_task(experiment)
  optimizer = optimizer_lib.make_optimizer(
    experiment.optimizer, experiment.train.num_steps
  )
  mesh = parallel.make_mesh(experiment.mesh, devices)
  assert dict(mesh.shape) == {'data': 4, 'fsdp': 4, 'tensor': 1}
  with jax.set_mesh(mesh):
    state = state_lib.abstract_state(task, optimizer, mesh)
    batch = abstract_batch(experiment, parallel.batch_sharding(mesh))
    step = jax.jit(
      functools.partial(
        train_step,
        task=task,
        optimizer=optimizer,
        static_args=task.static_args(0),
      ),
      donate_argnums=0,
      out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
    )
    return step.lower(state, batch).compile()


def collectives(text):
  """Returns (kind, where it comes from) of each communication."""
  found = []
  for line in text.splitlines():
    if match := _COLLECTIVE.search(line):
      name = re.search(r'op_name="([^"]*)"', line)
      found.append((match[1], name[1] if name else ''))
  return found


def is_routing(name):
  """Whether an operation scores, selects, gathers or scatters tokens."""
  # `process` is the block that runs on the chosen tokens.
  return (
    re.search(r'block_1\b', name) is not None
    and re.search(r'/process\b', name) is None
  ) or re.search(r'top_k|sort|cumsum|router|predictor', name) is not None


def test_training_step_of_220m_compiles_for_16_chips(compiled_step, experiment):
  assert 210e6 < flops.num_params(experiment.model) < 230e6
  memory = compiled_step.memory_analysis()
  used = memory.temp_size_in_bytes + memory.argument_size_in_bytes
  assert used < 16e9  # What a v5e chip has.
  # XLA counts a loop's body once: one of six groups of blocks, about three
  # quarters of the arithmetic, and one of four chunks of the head.
  own = experiment.train.batch_size / 16 * flops.train(experiment.model, 2048)
  assert compiled_step.cost_analysis()['flops'] > 0.15 * own


def test_weights_are_gathered_once(compiled_step):
  # Seven kernels in each of two blocks, the embedding and the head: the
  # gradients use what the forward pass has gathered.
  gathered = [
    name
    for kind, name in collectives(compiled_step.as_text())
    if kind == 'all-gather'
  ]
  assert len(gathered) == 2 * 7 + 2


def test_the_logits_of_all_tokens_never_exist(compiled_step, experiment):
  tokens = experiment.train.batch_size * experiment.data.length // 16
  shapes = re.findall(r'f32\[([\d,]+),32768\]', compiled_step.as_text())
  rows = [math.prod(map(int, shape.split(','))) for shape in shapes]
  assert max(rows) == 1024 < tokens


def test_nothing_in_the_routing_becomes_communication(compiled_step):
  text = compiled_step.as_text()
  # The detector sees routing operations, and it sees communication.
  names = re.findall(r'op_name="([^"]*)"', text)
  assert any(is_routing(name) for name in names)
  found = collectives(text)
  assert any(kind == 'all-gather' for kind, _ in found)
  guilty = [
    (kind, name)
    for kind, name in found
    if is_routing(name)
    # Gradients of router and predictor are parameters' gradients: summed over
    # the devices as all others, in the backward pass.
    and not (
      kind == 'all-reduce'
      and 'transpose(jvp' in name
      and re.search(r'router|predictor', name)
    )
  ]
  assert not guilty


def test_gradients_are_summed_over_chips_in_float32(compiled_step):
  # Without tensor parallelism nothing else is summed over the chips.
  sums = re.findall(
    r'= (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(',
    compiled_step.as_text(),
  )
  assert any('f32[' in result for result in sums)
  assert not [result for result in sums if 'bf16[' in result]


def test_decoding_step_of_220m_compiles_for_one_chip(devices, experiment):
  config = experiment.model
  mode = RoutingMode(rule='router', overflow='drop')
  sharding = jax.sharding.SingleDeviceSharding(devices[0])

  def place(tree):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )

  def init():
    tokens_BL = jnp.zeros((1, 2), jnp.int32)
    variables = config.build().init(jax.random.key(0), tokens_BL)
    _, params = lm.unrolled(config, nn.unbox(variables)['params'])
    return params

  def step(params, tokens_B1, cache):
    model = lm.LanguageModel(unrolled)
    output = model.apply({'params': params}, tokens_B1, mode=mode, cache=cache)
    return output.logits_BLV, output.cache

  unrolled = config_lib.replace(config, {'scan_layers': False})
  batch, length = 8, 2048
  cache = place(
    jax.eval_shape(lambda: lm.LMCache.empty(unrolled, batch, length, mode))
  )
  slots = {block.position_BS.shape[-1] for block in cache.blocks}
  assert slots == {2048, 320}  # Routed layers: 1.25 · 12.5% of it.
  tokens_B1 = place(jax.ShapeDtypeStruct((batch, 1), jnp.int32))
  compiled = (
    jax.jit(step, donate_argnums=2)
    .lower(place(jax.eval_shape(init)), tokens_B1, cache)
    .compile()
  )
  assert compiled.memory_analysis().argument_size_in_bytes < 16e9
  text = compiled.as_text()
  # One loop over the routed rows for each routed block.
  assert len(re.findall(r' while\(', text)) == config.num_routed
  assert not collectives(text)


def vision_model(name):
  """Returns a small model that calls a kernel."""
  dense = ViTConfig(
    **{'image_size': 64, 'patch_size': 8, 'num_layers': 2, 'num_classes': 8},
    width=256,
    num_heads=8,
  )
  if name == 'acm':
    adaptive = AdaptiveConfig(replace=(FFNS,))
    return dataclasses.replace(dense, adaptive=adaptive)
  return config_lib.replace(dense, {'routing': VisionRoutingConfig()})


@pytest.mark.parametrize('name', ['amod', 'acm'])
def test_kernels_run_on_each_chips_part(devices, name):
  model = vision_model(name)
  mesh = parallel.make_mesh(parallel.MeshConfig(data=8, tensor=2), devices)

  def run(variables, image):
    def loss(variables):
      return model.build().apply(variables, image).logits_BV.sum()

    # The gates choose without gradients.
    return (jax.grad(loss) if name == 'amod' else loss)(variables)

  init = model.build().init
  boxed = jax.eval_shape(
    lambda: init(jax.random.key(0), jnp.zeros((16, 64, 64, 3)))
  )
  with jax.set_mesh(mesh):
    variables = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      nn.unbox(boxed),
      parallel.shardings(boxed, mesh),
    )
    image = jax.ShapeDtypeStruct(
      (16, 64, 64, 3), jnp.float32, sharding=parallel.batch_sharding(mesh)
    )
    compiled = jax.jit(run).lower(variables, image).compile()
  text = compiled.as_text()
  assert 'tpu_custom_call' in text
  # Two images, four heads or half of the hidden units on each chip.
  tokens = model.num_tokens
  part = (
    rf'\[8,{tokens},32\]|\[2,4,{tokens},32\]|\[2,{tokens},4,32\]'
    if name == 'amod'
    else r'\[4,256,128\]'
  )
  assert re.search(part, text)
  # No chip gets what another one has of the batch: sums only.
  assert {kind for kind, _ in collectives(text)} <= {'all-reduce'}
