"""Shows the progress of a run: by a bar on a terminal, elsewhere by lines."""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import datetime
import os
import sys
import time
from typing import Any

import tqdm

_BAR = '{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]'
_SMOOTHING = 0.3  # Weight of the newest measurement in the rate.


@dataclasses.dataclass
class Progress(contextlib.AbstractContextManager):
  """Shows a run's steps, speed and remaining time.

  On a terminal this is one bar that stays at the bottom; elsewhere a line is
  printed every few seconds, without carriage returns. Speed and remaining time
  are shown from the second update on, so that they exclude the compilation of
  the first step.
  """

  total_steps: int  # Steps of the whole run.
  start_step: int = 0  # Steps taken already, when resuming.
  _: dataclasses.KW_ONLY
  # Tokens (or what `unit` says) in a batch over all devices; None hides the
  # rate.
  tokens_per_step: float | None = None
  # Maps a step's number, from 1 on, to the model's FLOPs in it, multiply-add
  # counted as 2; None hides the rate.
  flops_of_step: Callable[[int], float] | None = None
  # Peak FLOP/s of all devices together; None hides the model FLOPs utilization
  # (MFU, Chowdhery et al. 2022).
  peak: float | None = None
  unit: str = 'tokens'
  stream: Any = None  # File to write to; None is standard error.
  # Minimum seconds between two displayed updates, except the first and the
  # last; by default 0.5 on a terminal and 5 elsewhere.
  interval: float | None = None
  clock: Callable[[], float] = time.monotonic
  enabled: bool = True  # False shows nothing, as on all hosts but the first.

  def __post_init__(self):
    self.stream = sys.stderr if self.stream is None else self.stream
    terminal = _is_terminal(self.stream)
    if self.interval is None:
      self.interval = 0.5 if terminal else 5.0
    self._pending = None  # Step and values of an update that is not shown yet.
    self._shown = None  # Step and time of the last displayed update.
    self._rate = None  # Steps per second.
    self._flops = None  # FLOPs per second.
    self._bar = None
    if self.enabled and terminal:
      self._bar = tqdm.tqdm(
        total=self.total_steps,
        initial=self.start_step,
        file=self.stream,
        dynamic_ncols=True,
        bar_format=_BAR,
      )

  def __exit__(self, *exc_info):
    self.close()

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Notes the step, and `values` to show beside it; shows them if due."""
    if not self.enabled:
      return
    self._pending = (step, values)
    now = self.clock()
    if (
      self._shown is None
      or step >= self.total_steps
      or now - self._shown[1] >= self.interval
    ):
      self._show(now)

  def message(self, text: str) -> None:
    """Prints a line, which stays above the bar."""
    if self.enabled and self._bar is None:
      print(text, file=self.stream, flush=True)
    elif self.enabled:
      tqdm.tqdm.write(text, file=self.stream)

  def close(self) -> None:
    """Shows the last update, and leaves the bar on the terminal."""
    if self.enabled and self._pending is not None:
      self._show(self.clock())
    if self._bar is not None:
      self._bar.close()
    self._bar = None
    self.enabled = False

  def _show(self, now):
    step, values = self._pending
    self._pending = None
    parts = [f'{name} {value:.4g}' for name, value in values.items()]
    if self._shown is not None and now > self._shown[1]:
      seconds = now - self._shown[1]
      steps = range(self._shown[0] + 1, step + 1)
      self._rate = _smooth(self._rate, len(steps) / seconds)
      if self.flops_of_step:
        flops = sum(map(self.flops_of_step, steps))
        self._flops = _smooth(self._flops, flops / seconds)
    self._shown = (step, now)
    if self._rate:
      if self.tokens_per_step:
        number, prefix = _scaled(self._rate * self.tokens_per_step)
        parts.append(f'{number}{prefix} {self.unit}/s')
      if self._flops:
        number, prefix = _scaled(self._flops)
        parts.append(f'{number} {prefix}FLOP/s')
        if self.peak:
          parts.append(f'{self._flops / self.peak:.1%} MFU')
      seconds_left = max(0, self.total_steps - step) / self._rate
      parts.append(f'left {datetime.timedelta(seconds=round(seconds_left))}')
    if self._bar is None:
      self.message('  '.join([f'step {step}/{self.total_steps}', *parts]))
    else:
      self._bar.n = step
      self._bar.set_postfix_str(', '.join(parts), refresh=False)
      self._bar.refresh()


def _is_terminal(stream) -> bool:
  if not getattr(stream, 'isatty', lambda: False)():
    return False
  try:
    # Terminals in containers may have size 0, where tqdm draws nothing.
    return all(os.get_terminal_size(stream.fileno()))
  except (OSError, AttributeError):
    return True


def _smooth(before: float | None, now: float) -> float:
  return now if before is None else before + _SMOOTHING * (now - before)


def _scaled(value) -> tuple[str, str]:
  """Returns a number of three digits, and the SI prefix of its unit."""
  for prefix in ('', 'k', 'M', 'G', 'T', 'P'):
    if value < 999.5 or prefix == 'P':
      return f'{value:.3g}', prefix
    value /= 1000
