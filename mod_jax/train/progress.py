"""Progress: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Mapping
import datetime
import os
import sys
import time

import tqdm

_BAR = '{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]'
_SMOOTHING = 0.3  # Weight of the newest measurement in the rate.


class Progress:
  """Shows a run's steps, speed and remaining time.

  On a terminal it is one bar that stays at the bottom; elsewhere a line every
  few seconds, without carriage returns. Speed and the time left are shown from
  the second update on, so that they exclude the compilation of the first step.
  """

  def __init__(
    self,
    total_steps: int,
    start_step: int = 0,
    *,
    tokens_per_step: float | None = None,
    flops_of_step: Callable[[int], float] | None = None,
    peak: float | None = None,
    unit: str = 'tokens',
    stream=None,
    interval: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    enabled: bool = True,
  ):
    """Shows an empty bar, if on a terminal.

    Args:
      total_steps: steps of the whole run.
      start_step: steps taken already, when resuming.
      tokens_per_step: tokens (or what `unit` says) in a batch over all devices;
        None hides the rate.
      flops_of_step: maps a step's number, from 1 on, to the model's FLOPs in
        it, multiply-add counted as 2; None hides the rate.
      peak: peak FLOP/s of all devices together; None hides the model FLOPs
        utilization (MFU, Chowdhery et al. 2022).
      unit: what a batch is counted in, such as `images`.
      stream: where to write; by default standard error.
      interval: minimum seconds between two displayed updates, except the first
        and the last; by default 0.5 on a terminal and 5 elsewhere.
      clock: returns seconds.
      enabled: False shows nothing, as on all hosts but the first.
    """
    self._total_steps = total_steps
    self._tokens_per_step = tokens_per_step
    self._flops_of_step = flops_of_step
    self._peak = peak
    self._unit = unit
    self._stream = sys.stderr if stream is None else stream
    self._clock = clock
    self._enabled = enabled
    terminal = _is_terminal(self._stream)
    default = 0.5 if terminal else 5.0
    self._interval = default if interval is None else interval
    self._pending = None  # Step and values of an update that is not shown.
    self._shown = None  # Step and time of the last displayed update.
    self._rate = None  # Steps per second.
    self._flops = None  # FLOPs per second.
    self._bar = None
    if enabled and terminal:
      self._bar = tqdm.tqdm(
        total=total_steps,
        initial=start_step,
        file=self._stream,
        dynamic_ncols=True,
        bar_format=_BAR,
      )

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.close()

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Records the steps taken and numbers to show beside them, by name."""
    if not self._enabled:
      return
    self._pending = (step, values)
    now = self._clock()
    if (
      self._shown is None
      or step >= self._total_steps
      or now - self._shown[1] >= self._interval
    ):
      self._show(now)

  def message(self, text: str) -> None:
    """Prints a line of its own, above the bar."""
    if self._enabled and self._bar is None:
      print(text, file=self._stream, flush=True)
    elif self._enabled:
      tqdm.tqdm.write(text, file=self._stream)

  def close(self) -> None:
    """Shows the last update, and leaves the bar on the terminal."""
    if self._enabled and self._pending is not None:
      self._show(self._clock())
    if self._bar is not None:
      self._bar.close()
    self._bar = None
    self._enabled = False

  def _show(self, now):
    step, values = self._pending
    self._pending = None
    parts = [f'{name} {value:.4g}' for name, value in values.items()]
    if self._shown is not None and now > self._shown[1]:
      seconds = now - self._shown[1]
      steps = range(self._shown[0] + 1, step + 1)
      self._rate = _smooth(self._rate, len(steps) / seconds)
      if self._flops_of_step:
        flops = sum(map(self._flops_of_step, steps))
        self._flops = _smooth(self._flops, flops / seconds)
    self._shown = (step, now)
    if self._rate:
      if self._tokens_per_step:
        number, prefix = _scaled(self._rate * self._tokens_per_step)
        parts.append(f'{number}{prefix} {self._unit}/s')
      if self._flops:
        number, prefix = _scaled(self._flops)
        parts.append(f'{number} {prefix}FLOP/s')
        if self._peak:
          parts.append(f'{self._flops / self._peak:.1%} MFU')
      seconds_left = max(0, self._total_steps - step) / self._rate
      parts.append(f'left {datetime.timedelta(seconds=round(seconds_left))}')
    if self._bar is None:
      self.message('  '.join([f'step {step}/{self._total_steps}', *parts]))
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
  """Returns three digits and their SI prefix."""
  for prefix in ('', 'k', 'M', 'G', 'T', 'P'):
    if value < 999.5 or prefix == 'P':
      return f'{value:.3g}', prefix
    value /= 1000
