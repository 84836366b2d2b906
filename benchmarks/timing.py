"""Interleaved timings, and where they were taken."""

import datetime
import json
import pathlib
import platform
import statistics
import time

import jax
import jaxlib


def interleaved(
  functions: dict[str, object], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
  """Times functions in turn, so that a slow spell hits them all alike.

  Args:
    functions: by name; each is called without arguments and must block until
      its work is done.
    rounds: timed calls of each.
    warmup: calls before these.

  Returns:
    Seconds of every call, by name.
  """
  for function in functions.values():
    for _ in range(warmup):
      function()
  seconds = {name: [] for name in functions}
  for _ in range(rounds):
    for name, function in functions.items():
      start = time.perf_counter()
      function()
      seconds[name].append(time.perf_counter() - start)
  return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
  return {name: statistics.median(times) for name, times in seconds.items()}


def ratio_spread(
  seconds: dict[str, list[float]], above: str, below: str
) -> tuple[float, float, float]:
  """Returns the median of the rounds' ratios, and their quartiles."""
  ratios = sorted(
    a / b for a, b in zip(seconds[above], seconds[below], strict=True)
  )
  low, middle, high = statistics.quantiles(ratios, n=4)
  return middle, low, high


def environment() -> dict[str, str]:
  """Returns device and versions, to stand beside every number."""
  device = jax.devices()[0]
  return {
    'date': datetime.date.today().isoformat(),
    'device': device.device_kind,
    'platform': device.platform,
    'processor': _processor(),
    'devices': str(jax.device_count()),
    'python': platform.python_version(),
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
  }


def _processor() -> str:
  path = pathlib.Path('/proc/cpuinfo')
  if path.exists():
    lines = path.read_text().splitlines()
    names = [x.split(':')[1].strip() for x in lines if 'model name' in x]
    if names:
      return f'{names[0]}, {len(names)} cores'
  return platform.processor()


def save(script: str, results: dict) -> None:
  """Writes results beside the script that made them, and prints them."""
  path = pathlib.Path(script).with_suffix('.json')
  text = json.dumps({'environment': environment(), **results}, indent=2)
  path.write_text(text + '\n')
  print(text)
