"""What is timed and where, and what is told of numbers by seed."""

import datetime
import os
import pathlib
import platform
import statistics
import sys

import jax
import jaxlib
import optax


def result_path(
  script: str, suffix: str, trial: str | None = None
) -> pathlib.Path:
  """Returns the path of a result: beside its script, or in a trial's folder.

  Args:
    script: its path.
    suffix: what stands in place of `.py`.
    trial: the directory of a trial, whose results are nobody's; None for runs
      that count.
  """
  path = pathlib.Path(script)
  return pathlib.Path(trial or path.parent, path.stem + suffix)


def train_step(loss, params, optimizer: optax.GradientTransformation, batch):
  """Returns a function that takes one training step and waits for it.

  Args:
    loss: of parameters and a batch.
    params: to begin with.
    optimizer: turns gradients into updates.
    batch: of every step.

  Returns:
    The function; its attribute `program` is the compiled program's text.
  """

  def update(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  carry = [params, optimizer.init(params)]
  compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*carry, batch)
  compiled = compiled.compile()

  def step():
    *carry[:], value = compiled(*carry, batch)
    value.block_until_ready()

  step.program = compiled.as_text()
  return step


def spread(values: list[float]) -> dict:
  """Returns what a table says of a number that differs between seeds."""
  return {
    'mean': statistics.mean(values),
    'low': min(values),
    'high': max(values),
    'values': values,
  }


def cell(found: dict | None, scale: float = 1.0, digits: int = 3) -> str:
  """Returns mean (lowest–highest) of a `spread`, times the scale."""
  if found is None:
    return ''
  mean, low, high = (scale * found[x] for x in ('mean', 'low', 'high'))
  if low == high:  # One run, or all alike.
    return f'{mean:.{digits}f}'
  return f'{mean:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})'


def markdown(header: list[str], rows: list[list[str]]) -> str:
  """Returns a table of texts."""
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def point(name: str, group: str, mega: float, accuracy: dict) -> dict:
  """Returns what `viz.accuracy_flops` draws of a `spread` of accuracies.

  Args:
    name: of the model.
    group: whose points are joined.
    mega: millions of FLOPs, or of multiply-accumulates.
    accuracy: as of `spread`; the bar is from the lowest to the highest.
  """
  return {
    'name': name,
    'group': group,
    'flops': mega,
    'accuracy': accuracy['mean'],
    'spread': (
      accuracy['mean'] - accuracy['low'],
      accuracy['high'] - accuracy['mean'],
    ),
  }


# Memory in large pages; and besides, never given back to the system, as by
# `mod_jax.cli.keep_freed_memory`, but from the environment: so the process of
# PyTorch has it too, and GLIBC_TUNABLES= measures without it.
HUGE_PAGES = 'glibc.malloc.hugetlb=1'
KEPT = ':'.join(
  (
    HUGE_PAGES,
    'glibc.malloc.arena_max=1',
    'glibc.malloc.mmap_max=0',
    f'glibc.malloc.trim_threshold={2**36}',
  )
)


def with_malloc(tunables: str) -> None:
  """Starts the script again with these settings of malloc, where it is glibc's.

  XLA takes every result's memory anew, and a CPU spends longer on the faults of
  small pages, .4 ms for each MB, than on many a layer. What one step gives back
  to the system the next one has to fault in again, the slower the more other
  processes want memory.

  Args:
    tunables: such as `HUGE_PAGES` or `KEPT`.
  """
  name = 'GLIBC_TUNABLES'
  if sys.platform == 'linux' and name not in os.environ:
    os.environ[name] = tunables
    os.execv(sys.executable, [sys.executable, *sys.argv])


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
    'glibc_tunables': os.environ.get('GLIBC_TUNABLES', ''),
  }


def _processor() -> str:
  path = pathlib.Path('/proc/cpuinfo')
  if path.exists():
    lines = path.read_text().splitlines()
    names = [x.split(':')[1].strip() for x in lines if 'model name' in x]
    if names:
      return f'{names[0]}, {len(names)} cores'
  return platform.processor()
