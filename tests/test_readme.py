"""What the README promises in code is run."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / 'README.md'


def test_notebook_example_runs_and_prints_what_it_says(capsys):
  (code,) = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)
  promised = re.findall(r'print\(.*# (\S.*)', code)
  exec(compile(code, 'README.md', 'exec'), {})  # The README is ours.
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == len(promised) >= 4
  for line, promise in zip(printed, promised, strict=True):
    # `8 of 32 tokens` promises 8.
    value = promise if promise.startswith('(') else promise.split()[0]
    assert line == value


def test_files_that_it_names_exist():
  text = README.read_text()
  root = README.parent
  names = set(re.findall(r'\b(?:configs|tests|benchmarks)/[\w/]+\.\w+', text))
  assert len(names) > 5
  missing = [name for name in names if not (root / name).exists()]
  assert not missing
  for script in re.findall(r'benchmarks/(\w+)\.py', text):
    assert (root / 'benchmarks' / f'{script}.json').exists()


def test_variants_that_it_names_exist(load_config_file):
  rows = re.findall(
    r'^\| `(configs/\S+)` \| (.*) \|$', README.read_text(), re.M
  )
  assert len(rows) >= 3
  for path, text in rows:
    for variant in re.findall(r'`(\w+)`', text):
      load_config_file(path, variant)
