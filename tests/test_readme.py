"""What the README and the pages of the site promise holds, line by line."""

import ast
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import re
import runpy
import shlex
import shutil
import sys

from absl import flags
from absl.testing import flagsaver
import numpy as np
from PIL import Image
import pytest
import tiny

import mod_jax
from mod_jax import cli
from mod_jax import config as config_lib
from mod_jax.data.images import ImageDataConfig, Preprocess
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.studies import (
  adaptive,
  confusion,
  conversion,
  images,
  language,
  speech,
)
from mod_jax.sweeps import grid
from mod_jax.tasks.experiment import ExperimentConfig

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
_HAS_LM_EVAL = importlib.util.find_spec('lm_eval') is not None
TEXTS = {
  path.relative_to(ROOT).as_posix(): path.read_text()
  for path in [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
  if '_generated' not in path.parts
}
PAGES = pytest.mark.parametrize('page', TEXTS)
FENCED = re.compile(r'^```([^\n]*)\n(.*?)^```', re.MULTILINE | re.DOTALL)

FILE = re.compile(r'# (\w+\.py)\n')  # The first line of what is a file.


def blocks(page, kind):
  """Returns the code of a page's fenced blocks of a kind."""
  return [code for k, code in FENCED.findall(TEXTS[page]) if k == kind]


def files(page):
  """Returns the blocks of a page that are files, by their names."""
  code = [FILE.match(code) for code in blocks(page, 'python')]
  return {match[1]: match.string for match in code if match}


@pytest.fixture(scope='module')
def desk(tmp_path_factory):
  """A folder with what snippets load: runs, pictures, texts, weights."""
  folder = tmp_path_factory.mktemp('desk')
  rng = np.random.default_rng(0)
  for name in ('cat.jpg', 'dog.png'):
    pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(folder / name)
  shutil.copy(ROOT / 'tests/golden/vit_timm.safetensors', folder)
  shutil.copytree(ROOT / 'tests/golden/detr', folder / 'detr-resnet-50')
  shutil.copytree(ROOT / 'tests/golden/lm_eval/model', folder / 'smollm2')
  template = '{% for m in messages %}{{ m.content }} {% endfor %}'
  (folder / 'smollm2' / 'chat_template.jinja').write_text(template)
  (folder / 'texts').mkdir()
  tiny.texts(folder / 'texts', a=5000, b=5000)
  sizes = {'image_size': 16, 'patch_size': 8, 'num_classes': 2}
  model = dataclasses.replace(tiny.VIT, routing=VisionRoutingConfig(), **sizes)
  reads = {'crop_fraction': 1.0, 'mean': (0.5,) * 3, 'std': (0.5,) * 3}
  classifier = mod_jax.Run(
    config=model,
    variables=tiny.variables(model),
    preprocess=Preprocess(image_size=16, **reads),
    classes=('cat', 'dog'),
  )
  mod_jax.export(classifier, folder / 'runs/amod')
  base = 'vit-base-patch16-224'
  mod_jax.export(classifier, folder / base, 'huggingface', dense=True)
  adapted = model.dense_twin().with_parts(lora=LoRAConfig(rank=2))
  adapters = mod_jax.Run(
    config=adapted, variables=tiny.variables(adapted), base=base
  )
  mod_jax.export(adapters, folder / 'adapters', 'peft')
  experiment = config_lib.load(ROOT / 'configs/lm/mod.py').get_config('tiny')
  mod_jax.export(tiny.run(experiment), folder / 'runs/mod')
  return folder


@pytest.mark.parametrize(
  'page', [page for page in TEXTS if blocks(page, 'python')]
)
def test_snippets_run_and_print_what_they_say(
  page, desk, monkeypatch, tmp_path, capsys
):
  """The snippets of a page are one program, but for those that are files."""
  shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  _write_files(page, tmp_path, monkeypatch)
  snippets = blocks(page, 'python')
  code = '\n'.join(x for x in snippets if x not in files(page).values())
  # Classes that a snippet defines look their module up.
  monkeypatch.setitem(sys.modules, 'snippet', type(sys)('snippet'))
  # The code is ours.
  exec(compile(code, page, 'exec'), vars(sys.modules['snippet']))
  printed = iter(capsys.readouterr().out.splitlines())
  for promise in re.findall(r'print\(.*# ([\d([].*)', code):
    # `8 of 32 tokens` promises 8, and `(2, 10): some words` the shape.
    value = promise.split()[0]
    if promise[0] in '([':
      value = promise.partition(':')[0]
    assert value in printed, promise


def _write_files(page, folder, monkeypatch):
  """Writes the files of a page, where Python and its commands find them."""
  for name, text in files(page).items():
    (folder / name).write_text(text)
    monkeypatch.delitem(sys.modules, name.removesuffix('.py'), raising=False)
  monkeypatch.syspath_prepend(folder)


def commands(page):
  """Returns the command lines of a page that concern mod_jax."""
  text = TEXTS[page]
  found = [c for kind, c in FENCED.findall(text) if kind in ('bash', 'yaml')]
  found += re.findall(r'(?<!`)`((?:python|make) [^`]+)`', text)
  # What a shell would fill in.
  lines = re.sub(r'\$\(\(.*?\)\)|"?\$\{?\w+\}?"?', '0', '\n'.join(found))
  lines = re.sub(r'\\\n\s*', '', lines)
  pattern = r'\b(?:(?:python|make) .*|mod-jax-\w+ .*)'
  for line in re.findall(pattern, lines):
    # Without what a shell, or somebody who quotes the command, puts behind.
    line = re.split(r' &&| #|(?<!\S)…', line)[0].strip()
    if line.count('"') % 2:
      line = line[: line.rindex('"')]
    yield [word for word in shlex.split(line) if '…' not in word]


@pytest.mark.parametrize('page', [p for p in TEXTS if any(commands(p))])
def test_commands_are_understood(page, monkeypatch, tmp_path):
  """Up to where they would begin: flags, files, variants, fields, values."""
  monkeypatch.chdir(ROOT)
  _write_files(page, tmp_path, monkeypatch)
  targets = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.M)
  for words in commands(page):
    for name in files(page):
      words = [w.replace(f'={name}', f'={tmp_path / name}') for w in words]
    match words:
      case ['make', *named]:
        assert set(named) <= set(targets), words
      # `make test-slow` installs what this one is made of.
      case ['python', '-m', 'mod_jax.lm_eval', *_] if not _HAS_LM_EVAL:
        pass
      case ['python', '-m', module, *_] if module.startswith('mod_jax'):
        _understand(words[2:], monkeypatch)
      case ['python', ('train.py' | 'eval.py'), *_]:
        _understand(words[1:], monkeypatch)
      case [('mod-jax-train' | 'mod-jax-eval') as name, *rest]:
        script = name.removeprefix('mod-jax-') + '.py'
        _understand([script, *rest], monkeypatch)
      case ['mod-jax-serve', *rest]:
        _understand(['mod_jax.scripts.serve', *rest], monkeypatch)
      case ['python', script, *_] if script.endswith('.py'):
        assert (ROOT / script).is_file(), words


def _understand(words, monkeypatch):
  """Runs a command up to where its `main` would be called."""
  asked = []

  def parse(main, argv=None, *, positional=False):
    asked.append(cli._parse_flags(argv or sys.argv, positional=positional))
    known = flags.FLAGS.flag_values_dict()
    if known.get('config'):
      config = cli.load_config(known['config'], object, complete=False)
      grid.points(config, grid.parse(config, known.get('sweep', [])))
    elif cli._overrides:
      cli.changed(TextDataConfig())  # What `prepare` takes the fields of.
    for study in known.get('study') or []:
      modules = (adaptive, confusion, conversion, images, language, speech)
      assert study == 'list' or any(hasattr(m, study) for m in modules)

  with monkeypatch.context() as patch, flagsaver.flagsaver():
    patch.setattr(cli, 'run', parse)
    patch.setattr(cli, '_overrides', [])
    # A sentence may name a command without the flags that it requires.
    patch.setattr(flags.FlagValues, 'validate_all_flags', lambda _: None)
    patch.setattr(sys, 'argv', list(words))
    runpy.run_path(_file(words[0]), run_name='__main__')
  assert len(asked) == 1


def _file(name):
  """Returns what Python runs for a script, or for `-m` and a module."""
  if name.endswith('.py'):
    return name
  spec = importlib.util.find_spec(name)
  if spec.submodule_search_locations is not None:
    spec = importlib.util.find_spec(f'{name}.__main__')
  return spec.origin


def test_a_wrong_command_is_noticed(monkeypatch):
  monkeypatch.chdir(ROOT)
  for words in (
    'train.py --config=configs/lm/mod.py:rav',
    'train.py --config=configs/lm/mod.py --config.model.widht=3',
    'train.py --config=configs/lm/mod.py --sweep=seed=x',
    'eval.py --temperature=warm',
    'mod_jax.data.prepare --config.tokenizer=words',
    'eval.py --workdir=runs/a --study=engagment',
  ):
    with pytest.raises((mod_jax.errors.UserError, AssertionError)):
      _understand(words.split(), monkeypatch)


@PAGES
def test_files_that_are_named_exist(page):
  folders = 'configs|tests|benchmarks|docs|results|mod_jax|kernels'
  names = re.findall(
    rf'(?<![\w/.:-])(?:{folders})/[a-z\d_/-]+\.[a-z]+', TEXTS[page]
  )
  assert [n for n in names if not (ROOT / n).exists()] == []
  of_files = re.findall(r'`([\w.]+)` in `(mod_jax/\S+\.py)`', TEXTS[page])
  for name, file in of_files:
    assert name.split('.')[-1] in (ROOT / file).read_text(), (name, file)
  # What measures keeps its result; what tunes prints it, and what is for the
  # devices or texts of others writes it to a directory of theirs.
  prints = ('tune', 'import_time', 'accelerator', 'kernel_errors', 'text_tasks')
  imported = ('rival_tasks', 'rivals')
  for script in set(re.findall(r'benchmarks/(\w+)\.py', TEXTS[page])):
    if script not in prints + imported:
      assert list((ROOT / 'benchmarks').glob(f'{script}.json*'))


def test_fields_beside_the_names_of_others_exist():
  rows = TEXTS['docs/training.md'].partition('## Names elsewhere')[2]
  names = re.findall(r'`([^`]+)`', ' '.join(re.findall(r'.*\| (.*) \|', rows)))
  assert len(names) > 20
  experiments = [
    ExperimentConfig(model=ViTConfig(), data=ImageDataConfig(image_size=224)),
    ExperimentConfig(model=LMConfig(), data=TextDataConfig()),
  ]
  known = set()
  for path, *_ in itertools.chain(*map(config_lib.walk, experiments)):
    known |= {path, path.rpartition('.')[0]}
  assert set(names) - known <= {'--config.'}


@PAGES
def test_variants_of_tables_exist(page):
  for path, text in re.findall(
    r'^\| `(configs/\S+\.py)` \| (.*) \|$', TEXTS[page], re.MULTILINE
  ):
    known = config_lib.load(ROOT / path).VARIANTS
    for variant in re.findall(r'`([a-z\d_]+)`', text):
      assert variant in known, (path, variant)


def anchors(text):
  """Returns what headings are linked by, as GitHub and MyST have it."""
  text = FENCED.sub('', text)
  headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return {
    re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
    for heading in headings
  }


@PAGES
def test_links(page):
  """Those within the tree; Sphinx checks again what it builds."""
  text = FENCED.sub('', TEXTS[page])
  for target in re.findall(r'\]\(([^)\s]+)\)', text):
    if re.match(r'https?:|mailto:', target):
      continue
    # Made with the site: not there where a repository shows the Markdown.
    assert '_generated/' not in target
    name, _, anchor = target.partition('#')
    path = ROOT / page
    if name:
      path = pathlib.Path(os.path.normpath(path.parent / name))
    assert path.exists(), target
    if anchor:
      assert anchor in anchors(path.read_text()), target


def test_extension_points_are_shown_as_they_are_tested():
  """In the Markdown itself, which other viewers than Sphinx show, too."""

  def classes(code):
    nodes = [x for x in ast.parse(code).body if isinstance(x, ast.ClassDef)]
    return {node.name: ast.unparse(node) for node in nodes}

  shown = classes('\n'.join(blocks('docs/extend.md', 'python')))
  tested = classes((ROOT / 'tests/extension/family.py').read_text())
  both = shown.keys() & tested.keys()
  assert {'ExpertThreshold', 'Above', 'Squared', 'SeriesTask'} <= both
  assert all(shown[name] == tested[name] for name in both)
