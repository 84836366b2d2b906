"""The table of logical axes, meshes, and what ends up on which device."""

import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import parallel
from mod_jax.errors import UserError
from mod_jax.layers import acm
from mod_jax.layers.attention import Attention, AttentionConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.token_info import TokenInfo
from mod_jax.models.lm import LMConfig
from mod_jax.parallel import MeshConfig

CONFIG = LMConfig(
  vocab_size=24,
  num_layers=2,
  width=16,
  num_heads=4,
  num_kv_heads=2,
  mlp_dim=12,
  routing=MoDConfig(capacity=0.5, predictor_width=3),
)

INFO = TokenInfo(jnp.zeros((4, 5), jnp.int32))


@pytest.fixture(scope='module')
def boxed():
  tokens = jnp.zeros((1, 4), jnp.int32)
  return jax.eval_shape(CONFIG.build().init, jax.random.key(0), tokens)[
    'params'
  ]


@pytest.mark.parametrize(
  ('names', 'words'),
  [
    (('embed', 'headz'), 'headz'),
    # One axis of the mesh for two of an array.
    (('heads', 'mlp'), 'heads'),
    (('batch', 'embed'), 'batch'),
    (('vocab', None, 'vocab'), 'vocab'),
  ],
)
def test_wrong_names_are_refused(names, words):
  with pytest.raises(ValueError, match=words):
    parallel.spec(names)
  leaf = nn.LogicallyPartitioned(
    jax.ShapeDtypeStruct((8,) * len(names), 'int32'), names
  )
  mesh = parallel.make_mesh(MeshConfig())
  with pytest.raises(ValueError, match=words):
    parallel.shardings({'a': leaf}, mesh)
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=words):
    parallel.constrain(jnp.ones((8,) * len(names)), *names)


class TestMeshConfig:
  @pytest.mark.parametrize(
    ('sizes', 'devices', 'want'),
    [
      ({}, 8, (8, 1, 1, 1)),
      ({'fsdp': 2, 'tensor': 2}, 8, (2, 2, 1, 2)),
      ({'data': 1, 'fsdp': -1}, 8, (1, 8, 1, 1)),
      ({'data': 2, 'fsdp': 3, 'expert': 4}, 24, (2, 3, 4, 1)),
    ],
  )
  def test_fills_in_the_rest(self, sizes, devices, want):
    assert MeshConfig(**sizes).sizes(devices) == want

  @pytest.mark.parametrize(
    'sizes',
    [{'tensor': 3}, {'data': 2}, {'fsdp': 16}, {'data': -1, 'fsdp': -1}],
  )
  def test_refuses_a_mesh_that_does_not_fit(self, sizes):
    with pytest.raises(UserError, match='does not fit 8 device|-1'):
      parallel.make_mesh(MeshConfig(**sizes), jax.devices())


class TestShardings:
  @pytest.mark.parametrize(
    ('sizes', 'named'),
    [
      ({'data': 2, 'tensor': 4}, "'heads'.*key.*size 2, which 4 devices"),
      ({'data': 1, 'fsdp': 3}, "'embed'.*size 16, which 3 devices"),
    ],
  )
  def test_refuses_an_axis_that_does_not_divide(self, boxed, sizes, named):
    number = sizes.get('fsdp', 1) * sizes.get('tensor', 1) * sizes['data']
    mesh = parallel.make_mesh(MeshConfig(**sizes), jax.devices()[:number])
    with pytest.raises(UserError, match=named):
      parallel.shardings(boxed, mesh)


class TestBatch:
  @pytest.mark.parametrize(
    'sizes',
    [{'data': 1, 'fsdp': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}],
    ids=str,
  )
  def test_rows_lie_on_data_and_fsdp_devices(self, sizes):
    mesh = parallel.make_mesh(MeshConfig(**sizes))
    parts = mesh.shape['data'] * mesh.shape['fsdp']
    batch = {'tokens': np.arange(24).reshape(8, 3), 'length': np.arange(8)}
    placed = parallel.put_batch(batch, mesh)
    for name, array in placed.items():
      np.testing.assert_array_equal(array, batch[name])
      shards = [np.asarray(shard.data) for shard in array.addressable_shards]
      assert {len(shard) for shard in shards} == {8 // parts}
      assert len({shard.tobytes() for shard in shards}) == parts
      assert array.sharding.is_equivalent_to(
        parallel.batch_sharding(mesh), array.ndim
      )

  def test_refuses_a_batch_that_does_not_divide(self):
    mesh = parallel.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    parallel.check_batch(12, mesh, 'batch_size')
    with pytest.raises(UserError, match='batch_size=6 .* multiple of 4'):
      parallel.check_batch(6, mesh, 'batch_size')


def _constraints(text):
  """Returns the tensor types and shardings of a lowered text's constraints."""
  return re.findall(
    r'sdy\.sharding_constraint [^<]*<@mesh, \[(.*?)\]> : tensor<([^>]*)>', text
  )


class TestConstrain:
  def test_under_a_mesh_shards(self):
    mesh = parallel.make_mesh(MeshConfig(data=4, tensor=2))
    double = jax.jit(lambda x: 2 * parallel.constrain(x, 'batch', 'act_mlp'))
    with jax.set_mesh(mesh):
      y = double(np.arange(48.0).reshape(8, 6))
    np.testing.assert_array_equal(y, 2 * np.arange(48.0).reshape(8, 6))
    assert {s.data.shape for s in y.addressable_shards} == {(2, 3)}

  def _lower(self, boxed):
    def forward(params, tokens):
      return CONFIG.build().apply({'params': params}, tokens)

    tokens = jax.ShapeDtypeStruct((8, 6), jnp.int32)
    return jax.jit(forward).lower(nn.unbox(boxed), tokens).as_text()

  def test_a_model_keeps_all_its_constraints(self, boxed):
    mesh = parallel.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
      found = _constraints(self._lower(boxed))
    assert found, 'the logical constraints were dropped'
    rows = '{"data", "fsdp", "expert"}'
    tensor = '{"tensor"}'
    # Blocks: six dense tokens, three routed ones.
    for length in (6, 3):
      assert (f'{rows}, {{}}, {{}}', f'8x{length}x16xf32') in found
      assert (f'{rows}, {{}}, {tensor}', f'8x{length}x12xf32') in found
      for heads in (4, 2):
        assert (
          f'{rows}, {{}}, {tensor}, {{}}',
          f'8x{length}x{heads}x4xf32',
        ) in found
    assert (f'{rows}, {{}}, {tensor}', '8x6x24xf32') in found

  def test_a_model_without_a_mesh_has_none(self, boxed):
    assert not _constraints(self._lower(boxed))


class TestPerDevice:
  """Kernels run on each device's part, and the whole comes out the same."""

  MESH = MeshConfig(data=2, fsdp=2, tensor=2)

  @pytest.mark.parametrize(
    ('batch', 'hidden', 'part'),
    [
      (4, 8, (1, 4)),
      # A batch that four do not divide runs whole on each.
      (3, 8, (3, 4)),
      # Hidden units that two do not divide: left to the compiler.
      (4, 7, (4, 7)),
    ],
  )
  def test_values_and_gradients(self, batch, hidden, part):
    rng = np.random.default_rng(0)
    x_BD = rng.normal(size=(batch, 6)).astype(np.float32)
    up_DF = rng.normal(size=(6, hidden)).astype(np.float32)
    down_FD = rng.normal(size=(hidden, 6)).astype(np.float32)
    seen = []

    def mlp(x_BD, absent, up_DF, down_FD):
      assert absent is None
      seen.append((x_BD.shape, up_DF.shape))
      return (parallel.sum_over(jnp.sin(x_BD @ up_DF) @ down_FD, 'mlp'),)

    def loss(*args):
      (y_BD,) = parallel.per_device(
        mlp,
        (('batch', None), (None,), (None, 'mlp'), ('mlp', None)),
        (('batch', None),),
      )(args[0], None, *args[1:])
      return jnp.sum(y_BD**2)

    def run():
      return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x_BD, up_DF, down_FD)

    want, want_grads = run()
    with jax.set_mesh(parallel.make_mesh(self.MESH)):
      got, grads = run()
    assert seen[0] == ((batch, 6), (6, hidden))
    assert seen[-1] == ((part[0], 6), (6, part[1]))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for grad, want_grad in zip(grads, want_grads, strict=True):
      np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-4)

  def test_means_of_heads(self):
    config = AttentionConfig(
      width=8, num_heads=4, num_kv_heads=4, head_dim=8, causal=False
    )
    module = Attention(config, score='mean')
    x_BLD = jax.random.normal(jax.random.key(0), (4, 5, 8))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), x_BLD, INFO))

    def loss(params):
      update = module.apply(params, x_BLD, INFO)
      weight_L = jnp.arange(5.0)
      score_BL = update.aux['attention']
      total = jnp.sum(update.update_BLD**2) + jnp.sum(score_BL**2 * weight_L)
      return total, score_BL

    run = jax.value_and_grad(loss, has_aux=True)
    (_, want_BL), want = jax.jit(run)(params)
    with jax.set_mesh(parallel.make_mesh(self.MESH)):
      (_, score_BL), grads = jax.jit(lambda p: run(p))(params)
    np.testing.assert_allclose(score_BL, want_BL, rtol=1e-5)
    np.testing.assert_allclose(score_BL.sum(axis=-1), 1, rtol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
      grads,
      want,
    )

  # As few as make one step, and several.
  @pytest.mark.parametrize('length', [3, 40])
  def test_chosen_learners(self, length):
    module = acm.ACM(acm.ffn_config(8, 32))
    z_BLD = jax.random.normal(jax.random.key(0), (4, length, 8))
    init = jax.jit(acm.ACM(module.config, mode='all').init)
    params = nn.unbox(init(jax.random.key(1), z_BLD))
    want_BLD, choice = jax.jit(module.apply)(params, z_BLD)
    assert len(np.unique(choice.learners_BL)) > 1
    with jax.set_mesh(parallel.make_mesh(self.MESH)):
      y_BLD, _ = jax.jit(lambda p: module.apply(p, z_BLD))(params)
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-5)
