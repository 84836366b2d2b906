"""Folders that somebody else has made: nothing in them is believed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def hostile(tmp_path):
  """A folder of `downloads` whose configs name a module that lies in it.

  Importing that leaves a file `ran`.
  """
  folder = tmp_path / 'downloads' / 'model'
  (folder / 'run').mkdir(parents=True)
  (folder / 'modeling.py').write_text(
    f'open({str(tmp_path / "ran")!r}, "a").write("x")\n'
    'from mod_jax.layers.slots import Slot\n'
    'class X(Slot):\n'
    '  pass\n'
  )
  return folder


def name(folder, module):
  """Has the configs in a folder name a class of a module."""
  model = {'feed_forward': {'type': f'{module}:X'}}
  fields = {'model': {'type': 'LMConfig'} | model, 'experiment': None}
  (folder / 'mod_jax.json').write_text(json.dumps(fields))
  (folder / 'run' / 'config.json').write_text(json.dumps({'model': model}))


def start(cwd, *args):
  env = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': f'{cwd}{os.pathsep}{ROOT}'}
  return subprocess.Popen(
    [sys.executable, *args],
    **{'cwd': cwd, 'env': dict(os.environ) | env, 'text': True},
    stderr=subprocess.PIPE,
  )


@pytest.mark.parametrize('above', [True, False])
def test_no_code_of_a_folder_is_run(hostile, tmp_path, above):
  cwd = tmp_path if above else hostile
  name(hostile, 'downloads.model.modeling' if above else 'modeling')
  load = f'import mod_jax; mod_jax.load({str(hostile)!r}'
  refused = (
    start(cwd, '-c', f'{load})'),
    start(cwd, '-m', 'mod_jax.scripts.serve', f'--model={hostile}'),
    start(cwd, ROOT / 'eval.py', f'--workdir={hostile}/run'),
  )
  for process in refused:
    *_, told = process.communicate()[1].splitlines()
    assert process.returncode
    assert "feed_forward.type='" in told
    assert 'is not imported' in told
  assert not (tmp_path / 'ran').exists()


def test_what_is_trusted_is_imported(hostile, tmp_path):
  """Read to the end, the class turns out to be abstract."""
  module = 'downloads.model.modeling'
  name(hostile, module)
  load = f'mod_jax.load({str(hostile)!r}, trust=[{module!r}])'
  trusting = (
    start(tmp_path, '-c', f'import mod_jax; {load}'),
    start(
      *(tmp_path, ROOT / 'eval.py', f'--workdir={hostile}/run'),
      f'--trust={module}',
    ),
  )
  for process in trusting:
    told = process.communicate()[1]
    assert 'feed_forward.type' in told
    assert 'is not imported' not in told
  assert (tmp_path / 'ran').read_text() == 'xx'
