"""Folders that somebody else has made: nothing in them is believed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import mod_jax
from mod_jax.errors import UserError

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
def test_no_code_of_a_folder_is_run(hostile, tmp_path, monkeypatch, above):
  name(hostile, 'downloads.model.modeling' if above else 'modeling')
  monkeypatch.syspath_prepend(tmp_path if above else hostile)
  for path in (hostile, hostile / 'run'):
    with pytest.raises(UserError, match=r"feed_forward.type='.*not imported"):
      mod_jax.load(path)
  assert not (tmp_path / 'ran').exists()


@pytest.mark.slow
def test_no_command_runs_it(hostile, tmp_path):
  name(hostile, 'modeling')
  refused = (
    start(hostile, '-m', 'mod_jax.scripts.serve', f'--model={hostile}'),
    start(hostile, ROOT / 'eval.py', f'--workdir={hostile}/run'),
  )
  for process in refused:
    *_, told = process.communicate()[1].splitlines()
    assert process.returncode
    assert 'is not imported' in told
  assert not (tmp_path / 'ran').exists()


@pytest.mark.slow
def test_what_is_trusted_is_imported(hostile, tmp_path):
  """Read to the end, the class turns out to be abstract."""
  module = 'downloads.model.modeling'
  name(hostile, module)
  load = f'mod_jax.load({str(hostile)!r}, trust=[{module!r}])'
  evaluate = ROOT / 'eval.py', f'--workdir={hostile}/run'
  trusting = (
    start(tmp_path, '-c', f'import mod_jax; {load}'),
    start(tmp_path, *evaluate, f'--trust={module}'),
  )
  for process in trusting:
    told = process.communicate()[1]
    assert 'feed_forward.type' in told
    assert 'is not imported' not in told
  assert (tmp_path / 'ran').read_text() == 'xx'
