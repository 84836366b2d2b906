"""Finds block sizes of the kernels for the device at hand.

    python benchmarks/tune.py --op=acm_mlp

Starts from the table's entry (`kernels/mod_jax_kernels/<op>/tiles.py`). Each
size in turn is halved and doubled, and the fastest is kept, by the time of a
forward and backward pass; this is repeated `--passes` times. Candidates that do
not compile are skipped. Prints an entry for the table, and writes it beside
this file as JSON. Needs a GPU or a TPU; `--interpret` runs the script at tiny
sizes on a CPU, to try it out.
"""

import functools
import importlib

from absl import app, flags
import jax
import jax.numpy as jnp

from mod_jax import timing
import mod_jax_kernels
from mod_jax_kernels import dispatch, tiles
import results as results_lib

_OP = flags.DEFINE_enum(
  'op', 'acm_mlp', ['acm_mlp', 'route_scores', 'token_select'], 'What to tune.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 9, 'Timed calls of each candidate.')
_PASSES = flags.DEFINE_integer('passes', 2, 'Over all sizes.')
_NAMES = flags.DEFINE_list('names', [], 'Sizes to vary; all by default.')
_INTERPRET = flags.DEFINE_enum(
  'interpret', None, ['pallas', 'triton'], 'A trial of this backend on a CPU.'
)
_LEAST = 1e-2  # Smaller gains count as noise.


def case(op: str, backend: str):
  """Returns the function to be compiled, and its operands."""
  small = _INTERPRET.value is not None
  key = jax.random.key(0)
  dtype = jnp.float32 if small else jnp.bfloat16

  def normal(i, *shape):
    return jax.random.normal(jax.random.fold_in(key, i), shape, dtype)

  if op == 'token_select':
    shape, k = ((2, 32), 4) if small else ((128, 2048), 256)
    return (
      lambda x: mod_jax_kernels.token_select(x, k, implementation=backend),
      (normal(0, *shape).astype(jnp.float32),),
    )
  if op == 'route_scores':
    shape = (1, 20, 2, 32) if small else (64, 1024, 12, 64)

    def scored(*args):
      out, score = mod_jax_kernels.route_scores(*args, implementation=backend)
      return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(score**2)

    return jax.value_and_grad(scored, (0, 1, 2)), tuple(
      normal(i, *shape) for i in range(3)
    )
  tokens, width, hidden = (20, 16, 16) if small else (128 * 197, 768, 768)
  learners = 4
  chosen = jax.random.randint(key, (tokens,), 0, learners + 1)

  def adaptive(*args):
    y = mod_jax_kernels.acm_mlp(*args, chosen, implementation=backend)
    return jnp.sum(y.astype(jnp.float32) ** 2)

  return jax.value_and_grad(adaptive, (0, 1, 2, 3)), (
    normal(0, tokens, width),
    normal(1, learners, width, hidden),
    normal(2, learners, hidden),
    normal(3, learners, hidden, width),
  )


def compiled(op, backend, sizes):
  """Returns a function to time with these sizes, or None if they fail."""
  function, operands = case(op, backend)
  with tiles.trying(**sizes):
    try:
      run = jax.jit(function).lower(*operands).compile()
      jax.block_until_ready(run(*operands))
    except Exception as error:  # Compilers raise errors of many types.
      print(f'  {sizes}: {str(error).splitlines()[0][:120]}')
      return None
  return functools.partial(run, *operands)


def tune(op: str, backend: str) -> dict[str, int]:
  """Returns the fastest sizes found; prints the gain of each candidate."""
  table = importlib.import_module(f'mod_jax_kernels.{op}.tiles').TILES
  best = dict(tiles.choose(table, backend))
  if unknown := set(_NAMES.value or ()) - set(best):
    raise app.UsageError(
      f'--names={",".join(sorted(unknown))}: {op} on {backend} has'
      f' {", ".join(best)}.'
    )
  fastest = compiled(op, backend, best)
  if fastest is None:
    raise app.UsageError(f'{op}: the table entry {best} itself does not run.')
  for _ in range(_PASSES.value):
    before = dict(best)
    for name in _NAMES.value or before:
      for value in (best[name] // 2, best[name] * 2):
        sizes = {**best, name: value}
        candidate = compiled(op, backend, sizes) if value else None
        if candidate is None:
          continue
        seconds = timing.interleaved(
          {'best': fastest, 'candidate': candidate},
          rounds=_ROUNDS.value,
          queued=timing.queue_length(),
        )
        ratio, *_ = timing.ratio_spread(seconds, 'candidate', 'best')
        print(f'  {name} = {value}: {ratio:.3f} of the best so far')
        if ratio < 1 - _LEAST:
          best, fastest = sizes, candidate
    if best == before:
      break
  return best


def main(_):
  if _INTERPRET.value:
    with dispatch.interpret():
      best = tune(_OP.value, _INTERPRET.value)
    print(f'{_OP.value}, interpreted: {best}')
    results_lib.save(__file__, {'op': _OP.value, 'sizes': best})
    return
  platform = {'gpu': 'cuda'}.get(*(jax.default_backend(),) * 2)
  backend = {v: k for k, v in dispatch.PLATFORMS.items()}.get(platform)
  if backend is None:
    raise app.UsageError(
      f'no kernel runs on {platform}: tune on a GPU or a TPU, or try the script'
      ' with --interpret=triton.'
    )
  best = tune(_OP.value, backend)
  print(f'{_OP.value}: {jax.devices()[0].device_kind!r}: {best},')
  results_lib.save(__file__, {'op': _OP.value, 'sizes': best})


if __name__ == '__main__':
  app.run(main)
