"""Decoding steps by batch and context, against the dense twin's.

    python benchmarks/decode.py --torch=python3.11

Times, in turn, steps that decode one token of every sequence after a context
that fills the caches, with the dense twin; with Mixture-of-Depths (12.5% of the
tokens in every other block), either a few routed rows at a time or all rows
with a mask; and, if `--torch` names a Python that has torch and transformers,
with PyTorch's Llama of the dense twin's shape. Scores are Gaussian draws, so
that each row is routed with probability `capacity`, independently of the
others. `ideal_speedup` is the speedup if a step took only the time to read
weights and caches. The result is written beside this file as JSON.
"""

import contextlib
import functools

from absl import app, flags
import child
from flax import linen as nn
import jax
import jax.numpy as jnp
import machine

from mod_jax import timing
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
from mod_jax.sampling import generation
import results as results_lib

_WIDTH = flags.DEFINE_integer('width', 512, 'D')
_LAYERS = flags.DEFINE_integer('layers', 12, 'Number of blocks.')
_BATCHES = flags.DEFINE_list('batches', [1, 2, 4, 8, 16, 32], 'Sequences.')
_CONTEXTS = flags.DEFINE_list('contexts', [512, 2048], 'Tokens before.')
_TOKENS = flags.DEFINE_integer(
  'tokens', 2**14, 'Sequences times context at most: what there is memory for.'
)
_ROOM = flags.DEFINE_integer(
  'room', 1, 'Slots of the caches, in multiples of the context.'
)
ROUNDS = flags.DEFINE_integer('rounds', 30, 'Timed steps of each.')
DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of weights and caches.'
)
_TORCH = flags.DEFINE_string(
  'torch', None, 'A Python with torch and transformers; None goes without.'
)
_CAPACITY = 0.125
_WARMUP = 3


def filled(config: lm.LMConfig, batch: int, context: int, mode: RoutingMode):
  """Returns caches after `context` tokens, with room for the timed steps."""
  # With `drop`, a routed block's cache has slots for `capacity` of the length.
  steps = ROUNDS.value * timing.queue_length() + _WARMUP
  room = _ROOM.value * context + 2 * steps
  cache = lm.LMCache.empty(config, batch, room, mode)
  blocks = []
  for layer, block in zip(config.stack.layers, cache.blocks, strict=True):
    count = context
    if layer.routing is not None:
      count = min(round(layer.capacity * context), block.num_slots - 1)
    slot_S = jnp.arange(block.num_slots)
    position_S = jnp.where(
      slot_S < count, slot_S * context // count, block.position_BS[0]
    )
    key = jax.random.key(len(blocks))
    blocks.append(
      block.replace(
        key_BGSC=jax.random.normal(key, block.key_BGSC.shape, config.dtype),
        value_BGSC=jax.random.normal(key, block.value_BGSC.shape, config.dtype),
        position_BS=jnp.tile(position_S, (batch, 1)).astype(jnp.int32),
        length_B=jnp.full(batch, count, jnp.int32),
      )
    )
  return cache.replace(
    blocks=tuple(blocks), length_B=jnp.full(batch, context, jnp.int32)
  )


def step_function(config: lm.LMConfig, batch, context, mode: RoutingMode):
  """Returns a function that decodes a token of each row, without waiting."""
  model = config.build()
  key = jax.random.key(0)
  tokens_B1 = jax.random.randint(key, (batch, 1), 0, config.vocab_size)
  rngs = {'params': key, 'routing': key}
  params = nn.unbox(jax.jit(model.init)(rngs, tokens_B1))['params']
  params = jax.tree.map(lambda x: x.astype(config.dtype), params)
  cache = filled(config, batch, context, mode)
  state = {'cache': cache, 'step': 0}

  @generation.jit_steps(donate_argnums=0)
  def decode(cache, params, key):
    output = model.apply(
      {'params': params},
      tokens_B1,
      mode=mode,
      cache=cache,
      rngs={'routing': key},
    )
    return output.cache, output.logits_BLV.argmax()

  def step():
    state['step'] += 1
    state['cache'], value = decode(
      state['cache'], params, jax.random.key(state['step'])
    )
    return value

  step.cache_bytes = sum(
    block.key_BGSC.nbytes + block.value_BGSC.nbytes for block in cache.blocks
  )
  return step


def ideal(config: lm.LMConfig, batch: int, context: int) -> float:
  """Returns the dense twin's bytes read in a step, over those of MoD.

  Bytes are those of weights, caches and head. A routed block reads its weights
  if any row is routed, and caches of the routed rows only, each of which holds
  the fraction `capacity` of the context.
  """
  attention, size = config.block.attention, jnp.dtype(config.dtype).itemsize
  weights = (
    size
    * config.width
    * (
      2 * attention.head_dim * (attention.num_heads + attention.num_kv_heads)
      + 3 * config.block.mlp.hidden
    )
  )
  cache = 2 * size * attention.num_kv_heads * attention.head_dim
  head = size * config.width * config.vocab_size
  dense = weights + batch * context * cache
  any_row = 1 - (1 - _CAPACITY) ** batch
  rows, cached = batch * _CAPACITY, context * _CAPACITY
  routed = any_row * weights + rows * cached * cache
  half = config.num_layers / 2
  return (2 * half * dense + head) / (half * (dense + routed) + head)


def measure(mod: lm.LMConfig, batch: int, context: int) -> tuple[dict, str]:
  """Returns times and ratios for a batch size, and PyTorch's description."""
  dense = mod.dense_twin()
  in_turns = RoutingMode(rule='fixed', overflow='drop')
  masked = RoutingMode(rule='fixed', overflow='drop', chunk=0)
  make = functools.partial(step_function, batch=batch, context=context)
  steps = machine.built(
    {
      'dense': functools.partial(make, dense, mode=in_turns),
      'mod': functools.partial(make, mod, mode=in_turns),
      'mod_masked': functools.partial(make, mod, mode=masked),
    }
  )
  cache_bytes = {name: step.cache_bytes for name, step in steps.items()}
  about = None
  with contextlib.ExitStack() as stack:
    if _TORCH.value:
      sizes = (batch, context, dense.vocab_size, dense.width, dense.num_layers)
      sizes += (dense.num_heads, dense.block.mlp.hidden)
      steps['torch'], about = stack.enter_context(
        child.torch_steps(_TORCH.value, 'decode', *sizes)
      )
    seconds = timing.interleaved(
      steps,
      rounds=ROUNDS.value,
      warmup=_WARMUP,
      queued=timing.queue_length(),
    )
  # Means, not medians: a step's time depends on the number of routed rows.
  mean = {name: sum(x) / len(x) for name, x in seconds.items()}
  result = {
    'batch': batch,
    'context': context,
    'mean_seconds': mean,
    'median_seconds': timing.medians(seconds),
    'tokens_per_second': {name: batch / x for name, x in mean.items()},
    'speedup': mean['dense'] / mean['mod'],
    'speedup_masked': mean['dense'] / mean['mod_masked'],
    'ideal_speedup': ideal(mod, batch, context),
    'no_row_routed_probability': (1 - _CAPACITY) ** batch,
    'rows_at_a_time': in_turns.rows_at_a_time(_CAPACITY, batch),
    'cache_bytes': cache_bytes,
  }
  if about:
    result['dense_over_torch'] = mean['dense'] / mean['torch']
  return result, about


def main(_):
  machine.with_malloc(machine.KEPT)
  # Gaussian scores route each row independently, with probability `capacity`.
  mod = lm.LMConfig(
    num_layers=_LAYERS.value,
    width=_WIDTH.value,
    num_heads=_WIDTH.value // 64,
    dtype=DTYPE.value,
    routing=MoDConfig(capacity=_CAPACITY, score='gaussian'),
  )
  cells, about = [], None
  for context in map(int, _CONTEXTS.value):
    for batch in map(int, _BATCHES.value):
      if batch * context > _TOKENS.value:
        continue
      cell, about = measure(mod, batch, context)
      cells.append(cell)
      print(cell, flush=True)
  results = {
    **results_lib.settings('width', 'layers', 'rounds', 'room', 'dtype'),
    'vocab_size': mod.vocab_size,
    'capacity': _CAPACITY,
    'torch': about,
    'cells': cells,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
