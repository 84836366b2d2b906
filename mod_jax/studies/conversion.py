"""Compares a routed language model with the dense model that it was made of."""

import dataclasses
import math

import jax

from mod_jax import flops, timing
from mod_jax.layers.mode import Mode
from mod_jax.losses import sums as sums_lib
from mod_jax.runs import metrics as metrics_lib
from mod_jax.sampling import generate
from mod_jax.studies import devices
from mod_jax.train.task import Study

_BATCHES = 16
_ROUNDS = 9
_NEW = 32  # Tokens of a timed continuation; at most half of a row.
_COLUMNS = ('loss', 'bits_per_byte', 'flops', 'tokens_per_second')


def conversion(task, params, model_state) -> Study:
  """Measures what routing costs in quality, and what it saves.

  Reports the held-out loss of the dense model at `init`, and of the routed
  model under each rule and with all tokens in all blocks. Also reports FLOPs of
  a forward pass relative to the dense model and, for the dense model and causal
  rules, the tokens per second of generating one row, timed alternately.
  """
  model, modality = task.config.model, task.modality
  dense = model.dense_twin()
  source = task.load_whole(task.config.init, dense, dropped=modality.optional)
  variables = {'params': params, **model_state}
  all_tokens = dataclasses.replace(model.routing, capacity_floor=1.0)
  # Cases to compare: config, variables and mode of a model.
  with devices.one_device(source) as (source,):
    cases = {
      'dense': (dense, source, Mode()),
      'all tokens': (model.with_parts(routing=all_tokens), variables, Mode()),
    }
    for prefix, mode in modality.modes().items():
      cases[prefix.removesuffix('/')] = (model, variables, mode)
    results = {name: _held_out(task, *case) for name, case in cases.items()}
    decoding = ('dense', *modality.rules[1:])
    seconds, new = _continuations(task, {n: cases[n] for n in decoding})
  of_dense = flops.forward(dense, *modality.length)
  for name, (config, _, mode) in cases.items():
    # FLOPs without the routed blocks are not counted by `flops`.
    if mode.routing.rule != 'never':
      results[name]['flops'] = (
        flops.forward(config, *modality.length) / of_dense
      )
    if name in seconds:
      results[name]['tokens_per_second'] = new / seconds[name]
  lines = [' ' * 12 + ''.join(column.rjust(19) for column in _COLUMNS)]
  for name, row in results.items():
    cells = (row.get(column, math.nan) for column in _COLUMNS)
    shown = ('-' if math.isnan(x) else f'{x:.4f}' for x in cells)
    lines.append(name.ljust(12) + ''.join(cell.rjust(19) for cell in shown))
  lines.append(
    f'flops: of a forward pass over {modality.length[0]} tokens, over the dense'
    f" model's. tokens_per_second: of one row, {new} tokens after as many as"
    f' leave room, medians of {_ROUNDS} rounds in turn on'
    f' {jax.devices()[0].device_kind}.'
  )
  return Study(text='\n'.join(lines), metrics=results)


def _held_out(task, config, variables, mode) -> dict[str, float]:
  """Returns held-out loss and bits per byte of a model by its config."""
  model_state, sums = dict(variables), {}
  params = model_state.pop('params')
  for _, found in task.over_held_out(
    lambda output, batch: task.modality.eval_sums(output, batch, mode),
    *(params, model_state, _BATCHES, mode, config),
  ):
    sums = sums_lib.add(sums, found)
  metrics = task.finish_metrics(metrics_lib.finalize(sums))
  return {name: metrics[name] for name in _COLUMNS if name in metrics}


def _continuations(task, cases) -> tuple[dict[str, float], int]:
  """Returns each case's median seconds of a continuation, and its length."""
  (length,) = task.modality.length
  num_new = min(_NEW, length // 2)
  (batch,) = task.modality.eval_batches(batch_size=1, num_batches=1)
  tokens_BP = batch['tokens'][:, : length - num_new]

  def continuation(config, variables, mode):
    def run():
      generated = generate(
        *(config.build(), variables, tokens_BP),
        max_new_tokens=num_new,
        mode=mode.routing,
        temperature=0.0,
      )
      generated.tokens_BN.block_until_ready()

    return run

  seconds = timing.interleaved(
    {name: continuation(*case) for name, case in cases.items()}, rounds=_ROUNDS
  )
  return timing.medians(seconds), num_new
