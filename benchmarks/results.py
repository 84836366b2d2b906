"""Results of benchmarks: settings, ratios to a dense model, and their file."""

import json
import pathlib

from absl import flags
import machine

from mod_jax import timing

_SAVE = flags.DEFINE_bool('save', True, 'Write the JSON beside the script.')
_OUTPUT = flags.DEFINE_string('output', None, 'Write the JSON here instead.')


def save(script: str, results: dict, trial: str | None = None) -> None:
  """Prints results, and writes them as JSON, unless --nosave.

  Args:
    script: path of the script; the file is written beside it.
    results: the results.
    trial: as in `machine.result_path`.
  """
  if not _SAVE.value:
    print(results)
    return
  path = machine.result_path(script, '.json', trial)
  if _OUTPUT.value:
    path = pathlib.Path(_OUTPUT.value)
  text = json.dumps({'environment': machine.environment(), **results}, indent=2)
  whole = path.with_suffix('.part')
  whole.write_text(text + '\n')
  whole.replace(path)
  print(text)


def settings(*names: str) -> dict:
  """Returns flags' values by name."""
  return {name: flags.FLAGS[name].value for name in names}


def over(seconds: dict, flops: dict, name: str, base: str) -> dict:
  """Compares a model's time with another's, and with the ratio of FLOPs.

  Args:
    seconds: seconds of each round by model, from `timing.interleaved`.
    flops: FLOPs of a round, by model.
    name: name of the model.
    base: name of the model to compare with.
  """
  middle, low, high = timing.ratio_spread(seconds, name, base)
  ratio = flops[name] / flops[base]
  return {
    'time_ratio': middle,
    'quartiles': [low, high],
    'flop_ratio': ratio,
    'time_over_flops': middle / ratio,
  }


def over_dense(seconds: dict, flops: dict) -> dict[str, dict]:
  """Returns `over` of each model, over the one called 'dense'."""
  names = [name for name in flops if name != 'dense']
  return {name: over(seconds, flops, name, 'dense') for name in names}
