"""The wheel holds the whole library, and one version is told everywhere."""

import configparser
import email
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

import mod_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE_DIRS = {
  'mod_jax': ROOT / 'mod_jax',
  'mod_jax_kernels': ROOT / 'kernels' / 'mod_jax_kernels',
}


def modules_of_the_tree():
  return {
    str(pathlib.Path(name, path.relative_to(folder)))
    for name, folder in PACKAGE_DIRS.items()
    for path in folder.rglob('*.py')
  }


@pytest.fixture(scope='module')
def setup_cfg():
  parser = configparser.ConfigParser()
  parser.read(ROOT / 'setup.cfg')
  return parser


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """Builds the wheel without a network, from a copy that it may litter."""
  pytest.importorskip('setuptools')
  pytest.importorskip('wheel')
  source = tmp_path_factory.mktemp('source')
  for path in ROOT.iterdir():
    if path.suffix in ('.cfg', '.toml', '.md') or path.name == 'LICENSE':
      (source / path.name).write_bytes(path.read_bytes())
  for folder in PACKAGE_DIRS.values():
    for path in folder.rglob('*.py'):
      target = source / path.relative_to(ROOT)
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_bytes(path.read_bytes())
  out = tmp_path_factory.mktemp('wheel')
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-index'),
      *('--no-build-isolation', '--quiet', '--wheel-dir', out, source),
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  (built,) = out.glob('*.whl')
  with zipfile.ZipFile(built) as archive:
    yield archive


def test_wheel_holds_every_module_and_nothing_else(wheel):
  held = {name for name in wheel.namelist() if name.endswith('.py')}
  assert held == modules_of_the_tree()


def test_wheel_tells_version_licence_and_python(wheel):
  (name,) = (n for n in wheel.namelist() if n.endswith('.dist-info/METADATA'))
  metadata = email.message_from_bytes(wheel.read(name))
  assert metadata['Version'] == mod_jax.__version__
  assert metadata['License-Expression'] == 'Apache-2.0'
  assert metadata['Requires-Python'] == '>=3.12'
  assert any(n.endswith('/LICENSE') for n in wheel.namelist())


def test_setup_lists_every_package(setup_cfg):
  modules = modules_of_the_tree()
  folders = {pathlib.Path(module).parent for module in modules}
  assert {str(folder / '__init__.py') for folder in folders} <= modules
  listed = setup_cfg['options']['packages'].split()
  assert sorted(listed) == sorted('.'.join(folder.parts) for folder in folders)


def test_version_agrees_with_the_changelog(setup_cfg):
  assert setup_cfg['metadata']['version'] == 'attr: mod_jax.__version__'
  changelog = (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8')
  newest = re.search(r'^## \[?(\d+\.\d+\.\d+)', changelog, re.MULTILINE)
  assert newest[1] == mod_jax.__version__


def test_pins_meet_what_setup_asks_for(setup_cfg):
  pins = {}
  for file in ('requirements.txt', 'requirements-no-deps.txt'):
    for line in (ROOT / file).read_text(encoding='utf-8').splitlines():
      if line and not line.startswith('#'):
        name, version = line.split('==')
        pins[canonical(name)] = version
  assert pins['jax-cuda13-plugin'] == pins['jax']
  asked = (
    setup_cfg['options']['install_requires']
    + setup_cfg['options.extras_require']['dev']
  )
  for line in filter(None, asked.splitlines()):
    if line.startswith('#'):
      continue
    name, relation, bound = re.fullmatch(r'([\w.-]+)(>=|==)(.+)', line).groups()
    pinned = numbers(pins[canonical(name)])
    if relation == '==':
      assert pinned == numbers(bound), line
    else:
      assert pinned >= numbers(bound), line


def canonical(name):
  return re.sub('[-_.]+', '-', name).lower()


def numbers(version):
  return tuple(int(part) for part in version.split('.'))
