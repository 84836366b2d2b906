"""Time of choosing and moving tokens, alone and beside a routed block's step.

    python benchmarks/token_select.py

Times, in turn, top-k of a routed block's scores by each available backend, the
gather of the chosen tokens, and the scatter-add of their updates. Gather and
scatter-add include their gradients, as in a training step. Times are given as
shares of a forward and backward pass of the whole block, and together with a
lower bound: the time to move the bytes at the speed of a copy in the same run.
On a GPU or TPU, where these take less time than to start a program, a program
makes ten calls, one after another and on different arrays.
The result is written beside this file as JSON. On a GPU or TPU the defaults are
D = 1024 and S = 2048 in bfloat16; on a CPU they are smaller.
"""

import functools

from absl import app, flags
from flax import linen as nn
import jax
import jax.numpy as jnp

from mod_jax import routing, timing
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.block import BlockConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.routed import Layer, LayerConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.token_info import TokenInfo
from mod_jax_kernels.token_select import token_select
import results as results_lib

_BATCH = flags.DEFINE_integer('batch', None, 'Sequences.')
_LENGTH = flags.DEFINE_integer('length', None, 'S')
_WIDTH = flags.DEFINE_integer('width', None, 'D, a multiple of 64.')
_CAPACITY = flags.DEFINE_float('capacity', 0.125, 'Of the routed block.')
_DTYPE = flags.DEFINE_enum(
  'dtype', None, ['float32', 'bfloat16'], 'Of the computation.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed calls of each.')

# The kernels that run on each platform.
_KERNELS = {'tpu': ('pallas',), 'gpu': ('triton',)}


def sizes() -> dict:
  """Returns the settings, with the platform's defaults if none are given."""
  small = jax.default_backend() == 'cpu'
  defaults = (
    {'batch': 2, 'length': 512, 'width': 256, 'dtype': 'float32'}
    if small
    else {'batch': 8, 'length': 2048, 'width': 1024, 'dtype': 'bfloat16'}
  )
  settings = results_lib.settings(*defaults)
  return {
    **{
      n: x if settings[n] is None else settings[n] for n, x in defaults.items()
    },
    'capacity': _CAPACITY.value,
    'rounds': _ROUNDS.value,
  }


def routed_block(x_BLD, dy_BLD):
  """Returns a function that runs a forward and backward pass of a block."""
  batch, length, width = x_BLD.shape
  dtype = x_BLD.dtype.name
  heads = width // 64
  config = BlockConfig(
    attention=AttentionConfig(
      width=width, num_heads=heads, num_kv_heads=heads, head_dim=64
    ),
    mlp=MLPConfig(width=width, hidden=4 * width),
    dtype=dtype,
  )
  routing = MoDConfig()
  module = Layer(
    LayerConfig(block=config, routing=routing, capacity=_CAPACITY.value)
  )
  position_BL = jnp.broadcast_to(jnp.arange(length), (batch, length))
  info = TokenInfo(position_BL=position_BL)
  init = jax.jit(module.init)
  params = nn.unbox(init(jax.random.key(0), x_BLD, info))

  def step(params, x_BLD, dy_BLD):
    y_BLD, vjp = jax.vjp(
      lambda p, x: module.apply(p, x, info).x_BLD, params, x_BLD
    )
    return y_BLD, vjp(dy_BLD)

  return functools.partial(step, params), (x_BLD, dy_BLD)


def with_gradients(function):
  """Returns a function's result and VJP; the last argument is the cotangent."""

  def run(*args):
    *args, dy = args
    y, vjp = jax.vjp(function, *args)
    return y, vjp(dy)

  return run


def repeated(function, args):
  """Compiles calls, one after another, on copies of the arguments."""
  copies = [jax.tree.map(jnp.copy, args) for _ in range(timing.queue_length())]

  @jax.jit
  def run(copies):
    results = []
    for args in copies:
      # Wait for the result before.
      args, results[-1:] = jax.lax.optimization_barrier((args, results[-1:]))
      results.append(function(*args))
    return results

  return functools.partial(run, copies)


def calls(setting, k: int) -> dict:
  """Returns functions and their arguments by name, and the bytes they move."""
  batch, length, width = (setting[n] for n in ('batch', 'length', 'width'))
  dtype = setting['dtype']
  keys = iter(jax.random.split(jax.random.key(0), 6))
  x_BLD, dy_BLD = (
    jax.random.normal(next(keys), (batch, length, width), dtype) for _ in '12'
  )
  update_BKD, dy_BKD = (
    jax.random.normal(next(keys), (batch, k, width), dtype) for _ in '12'
  )
  score_BL = jax.random.normal(next(keys), (batch, length))
  index_BK, _ = jax.jit(routing.select_tokens, static_argnums=1)(score_BL, k)
  row = width * x_BLD.dtype.itemsize * batch
  kernels = _KERNELS.get(jax.default_backend(), ())
  functions = {'block': routed_block(x_BLD, dy_BLD)}
  num_bytes = {}

  for name in ('xla', 'sort', *kernels):
    select = functools.partial(token_select, k=k, implementation=name)
    functions[f'select_{name}'] = select, (score_BL,)
    num_bytes[f'select_{name}'] = 4 * batch * (length + k)

  gather = with_gradients(lambda x: routing.gather_tokens(x, index_BK))
  scatter = with_gradients(
    lambda x, u: routing.scatter_add_tokens(x, index_BK, u)
  )
  functions['gather'] = gather, (x_BLD, dy_BKD)
  functions['scatter_add'] = scatter, (x_BLD, update_BKD, dy_BLD)
  # Forward: read and write k rows. Backward: read k rows, write all, mostly 0.
  num_bytes['gather'] = row * (2 * k + k + length)
  # Forward: read x and the update, write a new array. Backward: read and write
  # k rows; the gradient of x is dy itself.
  num_bytes['scatter_add'] = row * (2 * length + k + 2 * k)

  functions['copy'] = lambda x: x + 1, (x_BLD,)
  num_bytes['copy'] = 2 * row * length
  return functions, num_bytes


def main(_):
  setting = sizes()
  k = routing.num_chosen(setting['capacity'], setting['length'])
  functions, num_bytes = calls(setting, k)
  seconds = timing.interleaved(
    {name: repeated(*call) for name, call in functions.items()},
    rounds=setting['rounds'],
  )
  median = {
    name: x / timing.queue_length()
    for name, x in timing.medians(seconds).items()
  }
  speed = num_bytes['copy'] / median['copy']
  share = {
    name: timing.ratio_spread(seconds, name, 'block')[0]
    for name in functions
    if name not in ('block', 'copy')
  }
  names = [n.removeprefix('select_') for n in share if n.startswith('select_')]
  results = {
    'settings': {**setting, 'k': k},
    'median_seconds': median,
    'share_of_block_step': share,
    'share_of_all_three': {
      name: share[f'select_{name}'] + share['gather'] + share['scatter_add']
      for name in names
    },
    'copy_bytes_per_second': speed,
    'floor_seconds': {
      name: amount / speed for name, amount in num_bytes.items()
    },
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
