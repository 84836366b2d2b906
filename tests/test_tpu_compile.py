"""Real programs compile for TPUs that are not here: libtpu alone does it."""

import collections
import dataclasses
import importlib.util
import math
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import flops, parallel
from mod_jax.errors import UserError
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import lm
from mod_jax.models.vit import ViTConfig
from mod_jax.parallel import MeshConfig
from mod_jax.prove import hlo, prove, slices
import mod_jax_kernels

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('quick_tpu'),
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='libtpu, the TPU compiler, is not installed: pip install libtpu',
  ),
]


@pytest.fixture(scope='module')
def devices(quick_tpu):
  """Sixteen TPU v5e chips, to compile for."""
  del quick_tpu  # Before anything compiles.
  (topology,) = slices.parse('v5e:4x4')
  return topology.devices()


@pytest.mark.usefixtures('devices')
def test_only_the_data_axis_goes_over_slices():
  from jax.experimental import topologies

  devices = topologies.get_topology_desc(
    platform='tpu', topology_name='v5e:4x4', num_slices=2
  ).devices
  mesh = parallel.make_mesh(MeshConfig(data=4, fsdp=4, tensor=2), devices)
  of_DFET = np.vectorize(lambda d: d.slice_index)(mesh.devices)
  assert of_DFET.shape == (4, 4, 1, 2)
  for i, of_FET in enumerate(of_DFET):
    assert (of_FET == i // 2).all()
  with pytest.raises(UserError, match='multiple of 2'):
    parallel.make_mesh(MeshConfig(data=1, fsdp=32), devices)


@pytest.fixture(scope='module')
def experiment(load_config_file):
  """The 220M model of the paper's config."""
  config = load_config_file('configs/lm/paper.py', '220m')
  return config_lib.replace(config, {'train.batch_size': 32})


@pytest.fixture(scope='module')
def compiled_step(devices, experiment):
  """The training step as the loop builds it, compiled for 16 chips."""
  assert experiment.mesh.sizes(16) == (4, 4, 1, 1)
  return prove.lower(experiment, devices).compile()


@pytest.fixture(scope='module')
def cost(compiled_step):
  return hlo.cost(compiled_step.as_text())


def test_training_step_of_220m_compiles_for_16_chips(
  compiled_step, experiment, cost
):
  assert 210e6 < flops.num_params(experiment.model) < 230e6
  memory = compiled_step.memory_analysis()
  used = memory.temp_size_in_bytes + memory.argument_size_in_bytes
  assert used < 16e9  # What a v5e chip has.
  # Its products are the model's own: nothing is computed a second time.
  in_kernels, _, others = prove.kernel_flops(cost.kernels)
  assert not others
  assert not cost.endless
  own = experiment.train.batch_size / 16 * flops.train(experiment.model, 2048)
  assert cost.flops - cost.again + in_kernels == pytest.approx(own, rel=0.03)
  assert cost.again < 0.01 * own
  # XLA's count leaves out most of it.
  assert compiled_step.cost_analysis()['flops'] < 0.6 * own


def test_weights_are_gathered_once_and_no_logits_of_all_tokens(
  compiled_step, experiment, cost
):
  # Seven kernels in each of two blocks, the embedding and the head: the
  # gradients use what the forward pass has gathered.
  gathered = [x for x in cost.collectives if x.kind == 'all-gather']
  assert len(gathered) == 2 * 7 + 2
  tokens = experiment.train.batch_size * experiment.data.length // 16
  shapes = re.findall(r'f32\[([\d,]+),32768\]', compiled_step.as_text())
  rows = [math.prod(map(int, shape.split(','))) for shape in shapes]
  assert max(rows) == 2048 < tokens


def test_a_routed_step_communicates_as_its_dense_twin(
  devices, experiment, cost
):
  model = experiment.model.dense_twin()
  dense = config_lib.replace(experiment, {'model': model})
  twin = hlo.cost(prove.lower(dense, devices).compile().as_text())

  def bytes_by_kind(cost):
    total = collections.Counter()
    for x in cost.collectives:
      total[x.kind, len(x.group)] += x.count * x.payload
    return total

  more = bytes_by_kind(cost)
  more.subtract(bytes_by_kind(twin))
  # Routers lie on every chip: their gradients are summed, and some metrics.
  routers = 4 * (flops.num_params(experiment.model) - flops.num_params(model))
  assert routers <= more.pop(('all-reduce', 16)) < routers + 1000
  assert ('all-gather', 4) in more
  assert ('reduce-scatter', 4) in more
  assert all(abs(difference) < 1000 for difference in more.values()), more


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
  assert not hlo.cost(text).collectives


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
  assert {x.kind for x in hlo.cost(text).collectives} <= {'all-reduce'}


def test_gradients_of_learners_keep_no_hidden_units_on_a_tpu(devices):
  tokens, width, hidden, learners, layers = 512, 128, 128, 3, 2

  def loss(x_TD, weights, k_T):
    def layer(x_TD, weights):
      return x_TD + mod_jax_kernels.acm_mlp(x_TD, *weights, k_T), None

    x_TD, _ = jax.lax.scan(layer, x_TD, weights)
    return x_TD.astype('float32').sum()

  def shape(*sizes, dtype='bfloat16'):
    return jax.ShapeDtypeStruct(sizes, dtype)

  of_layers = (layers, learners)
  weights = (
    shape(*of_layers, width, hidden),
    shape(*of_layers, hidden),
    shape(*of_layers, hidden, width),
  )
  chip = jax.sharding.SingleDeviceSharding(devices[0])
  step = jax.jit(jax.grad(loss, (0, 1)), in_shardings=chip, out_shardings=chip)
  args = shape(tokens, width), weights, shape(tokens, dtype='int32')
  text = step.lower(*args).compile().as_text()
  assert text.count('tpu_custom_call') == 2
  # For CPUs and GPUs the forward pass keeps an array of these.
  assert f'{tokens},{learners * hidden}]' not in text
