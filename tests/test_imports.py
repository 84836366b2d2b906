"""Imports go one way, and kernels know nothing of the library."""

import ast
import graphlib
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A unit is a module or subpackage of mod_jax, or a module of a subpackage, with
# a dot, that has a place of its own. It may import units of strictly lower
# layers, itself, and mod_jax_kernels.
LAYERS = (
  ('errors', 'last_words', 'peaks', 'tables', 'timing'),
  ('config', 'trees'),
  ('parallel', 'config_docs', 'paths'),
  ('losses', 'data'),
  ('routing',),
  ('layers',),
  ('models',),
  ('flops', 'convert', 'sampling', 'viz', 'optimizer'),
  ('serving',),
  ('runs',),
  ('train',),
  ('studies',),
  ('tasks.experiment',),
  ('pretrained.source',),
  ('tasks',),
  ('pretrained',),
  ('cli',),
  ('sweeps',),
  ('prove',),
  ('scripts', 'lm_eval'),
)
# Also command lines, by `python -m`: they may import whatever scripts may.
COMMANDS = (pathlib.Path('mod_jax/data/prepare.py'),)
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}


def imported_modules(source, package):
  """Yields every dotted name that a source in a package imports."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        parents = package.split('.')
        parents = parents[: len(parents) - node.level + 1]
        base = '.'.join([*parents, base] if base else parents)
      # `from mod_jax import flops` imports a module: keep the names.
      yield from (f'{base}.{alias.name}' for alias in node.names)


def is_under(module, top):
  return module == top or module.startswith(f'{top}.')


def unit_of(names):
  """Returns the unit of a module, by its names below mod_jax."""
  module = '.'.join(names[:2])
  return module if module in RANK else (*names, '')[0]


def library_faults(path, source):
  """Returns the imports of a mod_jax source that go the wrong way."""
  # The unit of mod_jax/__init__.py is mod_jax itself, below everything.
  unit = unit_of(path.with_suffix('').parts[1:]).replace('__init__', '')
  if unit and unit not in RANK:
    return [f'{path}: {unit} has no place in LAYERS; give it one']
  faults = []
  for module in imported_modules(source, '.'.join(path.parent.parts)):
    if not is_under(module, 'mod_jax'):
      continue
    target = unit_of(module.split('.')[1:])
    if target == unit or target == '__version__':
      continue
    if target not in RANK:
      faults.append(f'{path}: imports {module}, which has no place in LAYERS')
    elif not unit or (RANK[target] >= RANK[unit] and path not in COMMANDS):
      faults.append(f'{path}: imports {module}, which is not below {unit!r}')
  return faults


def imports_of(path, source, *tops):
  """Returns what a source imports of these packages."""
  package = '.'.join(path.parent.parts).removeprefix('kernels.')
  return [
    f'{path}: imports {module}'
    for module in imported_modules(source, package)
    if any(is_under(module, top) for top in tops)
  ]


def sources(*tops):
  for top in tops:
    for path in sorted((ROOT / top).rglob('*.py')):
      yield path.relative_to(ROOT), path.read_text(encoding='utf-8')


def test_imports_of_the_library_go_one_way():
  faults = [f for args in sources('mod_jax') for f in library_faults(*args)]
  assert not faults, '\n'.join(faults)


def imports_within(package):
  """Returns module -> the modules of the same package that it imports."""
  modules = {
    '.'.join(path.with_suffix('').parts).removesuffix('.__init__'): (path, text)
    for path, text in sources(package)
  }
  graph = {}
  for name, (path, text) in modules.items():
    targets = set(imported_modules(text, '.'.join(path.parent.parts)))
    # `from module import name` imports the module.
    targets |= {t.rpartition('.')[0] for t in targets if t not in modules}
    graph[name] = {t for t in targets if t in modules} - {name}
  return graph


def test_no_modules_import_each_other():
  # Raises CycleError, which names a circle.
  list(graphlib.TopologicalSorter(imports_within('mod_jax')).static_order())


@pytest.mark.parametrize(
  ('tops', 'modules', 'but_for'),
  [
    (('kernels',), ('mod_jax',), ()),
    (
      ('mod_jax', 'kernels'),
      ('jax_triton', 'triton'),
      ('triton_gpu.py', 'triton_call.py'),
    ),
    # Pictures share no state with a notebook.
    (('mod_jax',), ('matplotlib.pyplot',), ()),
  ],
)
def test_what_is_imported_nowhere_else(tops, modules, but_for):
  faults = [
    fault
    for path, source in sources(*tops)
    if path.name not in but_for
    for fault in imports_of(path, source, *modules)
  ]
  assert not faults, '\n'.join(faults)


# What takes long to import; for data, pictures, logs, and other libraries.
HEAVY = {
  *('grain', 'matplotlib', 'orbax', 'pyarrow', 'scipy', 'sklearn'),
  *('tensorboardX', 'tensorflow', 'tensorflow_datasets', 'torch'),
}
LOADED = """
import json, sys
import mod_jax
found = [sorted(sys.modules)]
from mod_jax.models import dynamic_vit, lm, vit
found += [sorted(sys.modules)]
mod_jax.load(sys.argv[1], num_heads=3)
print(json.dumps([*found, sorted(sys.modules)]))
"""


def test_what_is_heavy_is_imported_when_it_is_used():
  weights = ROOT / 'tests' / 'golden' / 'vit_timm.safetensors'
  done = subprocess.run(
    [sys.executable, '-c', LOADED, weights],
    capture_output=True,
    text=True,
    check=True,
  )
  package, models, load = map(set, json.loads(done.stdout))
  assert package & (HEAVY | {'jax'}) == set()
  assert models & HEAVY == set()
  # A run's checkpoints and data may be read now; nothing is drawn yet.
  assert load & HEAVY == {'grain', 'orbax', 'scipy'}
  # SciPy imports its parts when they are used.
  assert load & {'scipy.ndimage', 'scipy.special', 'scipy.stats'} == set()


@pytest.mark.parametrize(
  ('path', 'source'),
  [
    ('mod_jax/routing/gates.py', 'from mod_jax.layers import mlp'),
    ('mod_jax/routing/gates.py', 'from ..layers import mlp'),
    ('mod_jax/layers/mlp.py', 'def f():\n  from mod_jax.train import loop'),
    ('mod_jax/__init__.py', 'from mod_jax import errors'),
    ('mod_jax/train/loop.py', 'from mod_jax import nowhere'),
    ('mod_jax/novelty.py', 'import jax'),
  ],
)
def test_the_check_sees_a_wrong_import(path, source):
  assert library_faults(pathlib.Path(path), source)
