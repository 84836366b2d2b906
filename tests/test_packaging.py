"""The wheel holds the whole library, and one version is told everywhere."""

import configparser
import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

from packaging import requirements, utils
import pytest

import mod_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE_DIRS = {
  'mod_jax': ROOT / 'mod_jax',
  'mod_jax/configs': ROOT / 'configs',
  'mod_jax_kernels': ROOT / 'kernels' / 'mod_jax_kernels',
}


def files_of_the_tree():
  """Returns what the wheel must hold, by its path there."""
  return {
    f'{name}/{path.relative_to(folder)}': path
    for name, folder in PACKAGE_DIRS.items()
    for path in (*folder.rglob('*.py'), *folder.rglob('py.typed'))
  }


@pytest.fixture(scope='module')
def setup_cfg():
  parser = configparser.ConfigParser()
  parser.read(ROOT / 'setup.cfg')
  return parser


def run(*command, **kwargs):
  command = [sys.executable, *command]
  done = subprocess.run(command, capture_output=True, text=True, **kwargs)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def wheel_file(tmp_path_factory):
  """Builds the sdist, and the wheel from the sdist, offline.

  They are built in a copy of the files that the Dockerfile installs from.
  """
  pytest.importorskip('setuptools')
  pytest.importorskip('wheel')
  source = tmp_path_factory.mktemp('source')
  dockerfile = (ROOT / 'Dockerfile').read_text(encoding='utf-8')
  copies = re.findall(r'^COPY --chown=user (.+) \S+$', dockerfile, re.MULTILINE)
  for copied in copies:
    for name in copied.split():
      if (ROOT / name).is_dir():
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
      else:
        shutil.copy(ROOT / name, source)
  out = tmp_path_factory.mktemp('built')
  build = 'import sys; from setuptools import build_meta as build;'
  run('-c', build + 'build.build_sdist(sys.argv[1])', str(out), cwd=source)
  (sdist,) = out.glob('*.tar.gz')
  run(
    *('-m', 'pip', 'wheel', '--no-deps', '--no-index', '--quiet'),
    *('--no-build-isolation', '--wheel-dir', out, sdist),
  )
  (built,) = out.glob('*.whl')
  return built


@pytest.mark.slow
def test_wheel_holds_every_module_and_nothing_else(wheel_file):
  wheel = zipfile.ZipFile(wheel_file)
  held = {name for name in wheel.namelist() if '.dist-info/' not in name}
  assert held == files_of_the_tree().keys()
  assert {'mod_jax/py.typed', 'mod_jax/configs/lm/mod.py'} < held
  (name,) = (n for n in wheel.namelist() if n.endswith('.dist-info/METADATA'))
  metadata = email.message_from_bytes(wheel.read(name))
  assert metadata['Version'] == mod_jax.__version__
  assert metadata['License-Expression'] == 'Apache-2.0'
  assert metadata['Requires-Python'] == '>=3.12'
  assert any(n.endswith('/LICENSE') for n in wheel.namelist())


@pytest.mark.slow
def test_wheel_works_without_the_repository(wheel_file, tmp_path):
  target, empty = tmp_path / 'installed', tmp_path / 'empty'
  empty.mkdir()
  run(
    *('-m', 'pip', 'install', '--no-deps', '--no-index', '--quiet'),
    *('--target', target, wheel_file),
  )
  # In one process, since importing takes longest.
  start = (
    'import runpy, sys, mod_jax, mod_jax_kernels\n'
    'print(mod_jax.__file__, mod_jax_kernels.__file__)\n'
    'sys.argv = sys.argv[1:]\n'
    "runpy.run_path(sys.argv[0], run_name='__main__')"
  )
  told = run(
    *('-c', start, target / 'bin' / 'mod-jax-train'),
    # One that takes a sibling along.
    *('--config=configs/lm/dense.py:tiny', '--flops'),
    cwd=empty,
    # Before the repository, which is installed to be edited.
    env=os.environ | {'PYTHONPATH': str(target)},
  )
  imported, report = told.split('\n', maxsplit=1)
  assert imported == ' '.join(
    f'{target}/{name}/__init__.py' for name in ('mod_jax', 'mod_jax_kernels')
  )
  assert 'FLOPs of a forward pass over one sequence of 32 tokens' in report
  assert list(empty.iterdir()) == []


def test_setup_lists_every_package(setup_cfg):
  modules = {name for name in files_of_the_tree() if name.endswith('.py')}
  folders = {pathlib.Path(module).parent for module in modules}
  # Config files are no package: each is loaded by its path.
  packages = {f for f in folders if f.parts[:2] != ('mod_jax', 'configs')}
  assert {f'{package}/__init__.py' for package in packages} <= modules
  listed = setup_cfg['options']['packages'].split()
  assert sorted(listed) == sorted('.'.join(folder.parts) for folder in folders)


def test_version_agrees_with_the_changelog(setup_cfg):
  assert setup_cfg['metadata']['version'] == 'attr: mod_jax.__version__'
  changelog = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
  newest = re.search(r'^## \[?(\d+\.\d+\.\d+)', changelog, re.MULTILINE)
  assert newest[1] == mod_jax.__version__


def test_pins_meet_what_setup_asks_for(setup_cfg):
  base = pins_of('requirements.txt')
  lm_eval = pins_of('requirements-lm-eval.txt')
  no_deps = pins_of('requirements-no-deps.txt')
  assert no_deps == {'jax-cuda13-plugin': base['jax']}
  assert pins_of('requirements-cuda.txt')['jax-cuda13-pjrt'] == base['jax']
  assert not base.keys() & lm_eval.keys()
  extras = setup_cfg['options.extras_require']
  required = setup_cfg['options']['install_requires']
  for pins, asked in (
    (base | no_deps, required + extras['dev']),
    (base | lm_eval, extras['lm_eval']),
  ):
    for line in re.findall(r'^[^#\n].*', asked, re.M):
      wanted = requirements.Requirement(line)
      pinned = pins[utils.canonicalize_name(wanted.name)]
      assert wanted.specifier.contains(pinned), line


def pins_of(file):
  """Returns the versions in a file of pins, each of which has its hashes."""
  text = (ROOT / file).read_text(encoding='utf-8')
  assert '://' not in text
  found = {}
  for pin in re.findall(r'^[^#\n].*', text.replace('\\\n', ' '), re.M):
    version, *hashes = pin.split()
    name, version = version.split('==')
    assert all(x.startswith('--hash=sha256:') for x in hashes)
    assert hashes, pin
    found[utils.canonicalize_name(name)] = version
  return found
