"""Executes the notebooks beside this file, and stores their output in them.

    python docs/notebooks/run.py                 # all of them
    python docs/notebooks/run.py 4_*.ipynb       # some

`tests/test_notebooks.py` executes them too, with the sizes of its own table in
place of those in the cell that is tagged `parameters`.

In `models/` lie trained models, where training takes too long for a notebook.
It names the commands that trained them; they were written by

    mod_jax.export(mod_jax.load(WORKDIR, dtype='bfloat16'), 'models/NAME')
"""

import hashlib
import os
import pathlib
import re
import sys
import tempfile

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
import nbformat

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_EXECUTED = 'executed'  # Where the metadata keep what the output was made from.


def notebooks() -> list[pathlib.Path]:
  return sorted(HERE.glob('*.ipynb'))


def code_cells(notebook) -> list:
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def parameters(notebook):
  """Returns the cell that holds the sizes."""
  (cell,) = (
    cell
    for cell in code_cells(notebook)
    if 'parameters' in cell.metadata.get('tags', ())
  )
  return cell


def fingerprint(notebook) -> str:
  """Returns a hash of all code."""
  text = '\0'.join(cell.source for cell in code_cells(notebook))
  return hashlib.sha256(text.encode()).hexdigest()


def is_current(notebook) -> bool:
  """Whether the stored output was made from the code that stands there."""
  return notebook.metadata.get(_EXECUTED) == fingerprint(notebook)


def execute(notebook, folder: str | os.PathLike) -> None:
  """Runs all cells in a kernel of this Python, and keeps their output.

  Args:
    notebook: is changed.
    folder: working directory of the kernel, and where its temporary files go.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell raised an error.
  """
  folder = os.fspath(folder)
  # No kernel that is installed on this machine, but that of this environment.
  manager = AsyncKernelManager(
    kernel_name='python3', kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
  )
  path = [ROOT, ROOT / 'kernels', os.environ.get('PYTHONPATH', '')]
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join(map(str, filter(None, path))),
    'TMPDIR': folder,
    'IPYTHONDIR': f'{folder}/ipython',
  }
  environment.pop('JAX_NUM_CPU_DEVICES', None)  # Tests simulate several.
  client = NotebookClient(
    notebook,
    km=manager,
    timeout=1800,
    record_timing=False,
    coalesce_streams=True,
    resources={'metadata': {'path': folder}},
  )
  client.execute(env=environment, cleanup_kc=True)
  # Which lexer colours the magics; the versions here would be mere noise.
  language = {'name': 'python', 'pygments_lexer': 'ipython3'}
  notebook.metadata['language_info'] = language
  notebook.metadata[_EXECUTED] = fingerprint(notebook)
  tidy(notebook)


def tidy(notebook) -> None:
  """Puts a cell's log before its results, and shortens temporary paths.

  The kernel tells of its two streams one after the other, in no fixed order.
  Temporary folders are gone when somebody reads of them.
  """
  for cell in code_cells(notebook):
    cell.outputs.sort(key=lambda output: output.get('name') != 'stderr')
    for output in cell.outputs:
      if 'text' in output:
        output.text = re.sub(r'/tmp/(tmp\w+/)+', '', output.text)


def main(names: list[str]) -> None:
  paths = [pathlib.Path(name) for name in names] or notebooks()
  for path in paths:
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
      execute(notebook, folder)
    nbformat.write(notebook, path)
    print(f'{path.name}: {path.stat().st_size / 1e3:.0f} kB', flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
