"""Comparable timings of functions, by interleaved calls."""

from collections.abc import Callable, Mapping
import statistics
import time

import jax
import numpy as np


def interleaved(
  functions: Mapping[str, Callable],
  *,
  rounds: int,
  warmup: int = 1,
  queued: int = 1,
) -> dict[str, list[float]]:
  """Times functions in turn, so that a slow phase affects all alike.

  Args:
    functions: functions without arguments, by name. If one returns arrays, its
      time ends when they are computed.
    rounds: number of timed turns of each function.
    warmup: number of untimed calls of each function before its timed turns.
    queued: number of calls in a turn, of which only the last is waited for. A
      device with further calls in its queue does not wait for the host, as in a
      loop of training steps.

  Returns:
    Seconds per call in every turn, by name.
  """
  for function in functions.values():
    for _ in range(warmup):
      jax.block_until_ready(function())
  seconds = {name: [] for name in functions}
  for _ in range(rounds):
    for name, function in functions.items():
      start = time.perf_counter()
      for _ in range(queued):
        result = function()
      jax.block_until_ready(result)
      seconds[name].append((time.perf_counter() - start) / queued)
      # Drop the reference, or the next function has less memory.
      del result
  return seconds


def queue_length() -> int:
  """Returns a value for `queued`: 1 on CPUs, which hardly wait for the host."""
  return 1 if jax.default_backend() == 'cpu' else 10


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
  """Returns the median seconds, by name."""
  return {name: statistics.median(times) for name, times in seconds.items()}


def ratio_spread(
  seconds: Mapping[str, list[float]], above: str, below: str
) -> tuple[float, float, float]:
  """Returns median, lower and upper quartile, over rounds, of above / below."""
  ratios = np.divide(seconds[above], seconds[below])
  low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
  return middle, low, high
