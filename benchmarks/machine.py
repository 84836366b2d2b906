"""Where timings were taken, and files to keep them in."""

import datetime
import json
import pathlib
import platform

import jax
import jaxlib


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
