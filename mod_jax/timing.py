"""Comparable timings of functions, by interleaved calls."""

from collections.abc import Callable, Mapping
import statistics
import time

import numpy as np


def interleaved(
  functions: Mapping[str, Callable], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
  """Times functions in turn, so that a slow phase affects all alike.

  Args:
    functions: by name; each is called without arguments and must block until
      its work is done.
    rounds: timed calls of each.
    warmup: untimed calls of each before these.

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


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
  """Returns the median seconds, by name."""
  return {name: statistics.median(times) for name, times in seconds.items()}


def ratio_spread(
  seconds: Mapping[str, list[float]], above: str, below: str
) -> tuple[float, float, float]:
  """Returns the median of the rounds' ratios, and their quartiles."""
  ratios = np.divide(seconds[above], seconds[below])
  low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
  return middle, low, high
