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


def point(name: str, group: str, gmacs: float, accuracy: dict) -> dict:
  """Returns what `viz.accuracy_flops` draws of a `spread` of accuracies."""
  return {
    'name': name,
    'group': group,
    'flops': 1e3 * gmacs,
    'accuracy': accuracy['mean'],
    'spread': (accuracy['high'] - accuracy['low']) / 2,
  }


def with_huge_pages() -> None:
  """Starts the script again with memory in large pages, where glibc can.

  XLA takes every result's memory anew, and a CPU spends longer on the faults of
  small pages, .4 ms for each MB, than on many a layer.
  """
  name, value = 'GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1'
  if sys.platform == 'linux' and name not in os.environ:
    os.environ[name] = value
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
