"""The notebooks run from a clean kernel, and their stored output is theirs."""

import ast
import importlib.util
import pathlib

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PATHS = sorted((ROOT / 'docs' / 'notebooks').glob('*.ipynb'))
_MOST_BYTES = 600_000
# What stands in the cell of parameters, small enough for seconds.
TINY = {
  '1_mixture_of_depths': {
    'NUM_LAYERS': 2,
    'WIDTH': 16,
    'LENGTH': 32,
    'TOKENIZER': 'bytes',
    'VOCABULARY': 256,
    'NUM_STEPS': 10,
    'BATCH_SIZE': 4,
    'SAMPLED': 4,
  },
  '2_amod': {
    'DENSE_STEPS': 6,
    'FINE_TUNING_STEPS': 6,
    'CAPACITIES': (1.0, 0.5),
    'SMALLER': {'model.num_layers': 2, 'model.width': 16},
    'REPEATS': 1,
  },
  '3_pruning_and_acm': {
    'DENSE_STEPS': 4,
    'PRUNING_STEPS': 6,
    # A phase without steps is skipped.
    'LEARNERS_STEPS': 0,
    'GATES_STEPS': 0,
    'END_TO_END_STEPS': 4,
    'BUDGET': 0.4,
    'KEEPS': (0.5,),
    'SMALLER': {'num_layers': 1, 'width': 16},
    'STAGES': (0,),
  },
  '4_apply_and_extend': {
    'NUM_LAYERS': 2,
    'WIDTH': 16,
    'LENGTH': 16,
    'BATCH_SIZE': 4,
    'NUM_SEEDS': 2,
    'NUM_STEPS': 3,
    'CAPACITIES': (0.5,),
  },
  '5_isoflop': {
    'FINISHED': None,
    'BUDGETS': (1e9,),
    'SHAPES': ((2, 8, 1),),
    'NUM_SIZES': 1,
    'OPTIMUM': 8e3,
  },
  '6_kernels': {
    'WIDTH': 32,
    'HEADS': 2,
    'LENGTH': 32,
    'BATCH_SIZE': 2,
    'TOKENS': 64,
    'MLP_WIDTH': 32,
    'LEARNERS': 2,
    'LONG': 64,
    'REPEATS': 1,
  },
  # The models are trained and small; recordings and questions are few.
  '7_speech': {
    'SENTENCE': 'lumi',
    'VOICES': (1, 2),
    'FRAMES': 64,
    'HELD_OUT': 4,
    'MODEL': None,
  },
  '8_pictures': {'PICTURES': (0,), 'ASKED': 1, 'MODEL': None},
}


@pytest.fixture(scope='module')
def runner():
  """The module that executes notebooks."""
  path = ROOT / 'docs' / 'notebooks' / 'run.py'
  spec = importlib.util.spec_from_file_location('run_notebooks', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def of_each(function):
  return pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)(
    function
  )


def test_there_are_sizes_for_each():
  assert sorted(TINY) == [path.stem for path in PATHS]


def outputs(notebook):
  return [
    output
    for cell in notebook.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
  ]


@pytest.mark.slow
@of_each
def test_it_runs(path, runner, tmp_path):
  notebook = nbformat.read(path, as_version=4)
  sizes = runner.parameters(notebook)
  names = {
    node.id
    for node in ast.walk(ast.parse(sizes.source))
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  }
  assert names == set(TINY[path.stem])
  sizes.source = '\n'.join(f'{k} = {v!r}' for k, v in TINY[path.stem].items())
  before = path.read_bytes()
  # Raises the error of a cell.
  runner.execute(notebook, tmp_path)
  assert all(cell.execution_count for cell in runner.code_cells(notebook))
  assert path.read_bytes() == before
  # As many pictures as are stored, so none is drawn at full size only.
  assert pictures(notebook) == pictures(nbformat.read(path, as_version=4))


def pictures(notebook) -> int:
  return sum(
    'image/png' in output.get('data', ()) for output in outputs(notebook)
  )


@of_each
def test_its_stored_output_is_whole_and_current(path, runner):
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  assert runner.is_current(notebook), (
    f'{path.name} has changed since it was executed: python'
    f' docs/notebooks/run.py {path.relative_to(ROOT)}'
  )
  cells = runner.code_cells(notebook)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  assert not [o for o in outputs(notebook) if o.output_type == 'error']
  assert pictures(notebook)
  assert path.stat().st_size < _MOST_BYTES
  for output in outputs(notebook):
    # A temporary folder is gone when somebody reads of it.
    assert '/tmp' not in output.get('text', '')
    told = output.get('data', {})
    # A figure by its name is one that was not drawn.
    assert '<Figure' not in told.get('text/plain', '') or 'image/png' in told
