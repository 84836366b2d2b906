"""What smaller weights cost a language model, in nats per token.

    python benchmarks/dtype_loss.py --model=FOLDER --texts='docs/**/*.md'

FOLDER is a language model of Hugging Face, such as SmolLM2-135M. Rows are the
beginnings of the texts. Differences are paired by batch. The result is written
beside this file as JSON.
"""

import glob
import pathlib

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

import mod_jax
import results as results_lib

_MODEL = flags.DEFINE_string('model', None, 'The folder.', required=True)
_TEXTS = flags.DEFINE_string('texts', None, 'Their files.', required=True)
_LENGTH = flags.DEFINE_integer('length', 512, 'Tokens of a row.')
_ROWS = flags.DEFINE_integer('rows', 32, 'Rows.')
_BATCH = 2


def rows(run) -> np.ndarray:
  """Returns whole batches of the first tokens of texts with enough of them."""
  encoded = (
    run.encode(pathlib.Path(path).read_text())
    for path in sorted(glob.glob(_TEXTS.value, recursive=True))
  )
  long_enough = [
    ids[: _LENGTH.value] for ids in encoded if len(ids) >= _LENGTH.value
  ]
  count = min(len(long_enough), _ROWS.value) // _BATCH * _BATCH
  return np.array(long_enough[:count])


def main(_):
  losses, nbytes = {}, {}
  for dtype in (None, 'bfloat16', 'int8'):
    run = mod_jax.load(_MODEL.value, dtype=dtype)
    if dtype is None:
      tokens_BL = rows(run)
    losses[dtype] = [
      float(jnp.divide(*run.apply(batch[:, :-1], targets_BL=batch[:, 1:]).loss))
      for batch in jnp.split(jnp.asarray(tokens_BL), len(tokens_BL) // _BATCH)
    ]
    nbytes[dtype] = sum(x.nbytes for x in jax.tree.leaves(run.variables))
  float32 = losses.pop(None)
  results = {
    'model': pathlib.Path(_MODEL.value).name,
    'texts': _TEXTS.value,
    'tokens': int(tokens_BL.size),
    'loss': float(np.mean(float32)),
  }
  for dtype, values in losses.items():
    difference = np.subtract(values, float32)
    results[dtype] = {
      'more': float(difference.mean()),
      'standard_error': float(
        difference.std(ddof=1) / np.sqrt(len(difference))
      ),
      'bytes_over_float32': nbytes[dtype] / nbytes[None],
    }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
