"""What is timed, where, and files to keep the times in."""

import datetime
import json
import pathlib
import platform

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
  """

  def update(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  compiled = jax.jit(update, donate_argnums=(0, 1))
  carry = [params, optimizer.init(params)]

  def step():
    *carry[:], value = compiled(*carry, batch)
    value.block_until_ready()

  return step


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
