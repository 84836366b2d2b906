"""What a benchmark tells: its settings, ratios to a dense model, and a file."""

import json
import pathlib

from absl import flags
import machine

from mod_jax import timing

_SAVE = flags.DEFINE_bool('save', True, 'Write the JSON beside the script.')


def save(script: str, results: dict) -> None:
  """Prints results, and writes them beside their script, unless --nosave."""
  if not _SAVE.value:
    print(results)
    return
  path = pathlib.Path(script).with_suffix('.json')
  text = json.dumps({'environment': machine.environment(), **results}, indent=2)
  path.write_text(text + '\n')
  print(text)


def settings(*names: str) -> dict:
  """Returns flags' values by name."""
  return {name: flags.FLAGS[name].value for name in names}


def over_dense(seconds: dict, flops: dict) -> dict[str, dict]:
  """Returns each model's time over that of 'dense', beside its FLOPs'.

  Args:
    seconds: of every round, by model, as `timing.interleaved` returns them.
    flops: of a round, by model.
  """
  routed = {}
  for name in flops:
    if name == 'dense':
      continue
    middle, low, high = timing.ratio_spread(seconds, name, 'dense')
    ratio = flops[name] / flops['dense']
    routed[name] = {
      'time_ratio': middle,
      'quartiles': [low, high],
      'flop_ratio': ratio,
      'time_over_flops': middle / ratio,
    }
  return routed
