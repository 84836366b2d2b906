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
import kernel_cases

from mod_jax import timing
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
  dtype = 'float32' if small else 'bfloat16'
  # Blocks of the row matter where it does not fit one.
  arrays = kernel_cases.arrays(op, dtype, tiny=small, length=1024)
  return kernel_cases.with_gradients(op, backend), arrays


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
