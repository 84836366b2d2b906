"""Flipped bits in every kind of file that is read: none may crash or deceive.

    python tools/fuzz_files.py --count=5000 --seed=0

Each case flips a few bits of one file and reads it as `mod_jax.load`, the
server or training would. What comes of it is a sentence that refuses the file,
or what can be used; and where the file holds a hash of its contents, these are
what was written. Cases run in processes of their own, so that one that ends its
process, or hangs, is counted, too.
"""

import argparse
import collections
from collections.abc import Callable
import contextlib
import dataclasses
import io
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from typing import Any
import unittest.mock

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

# After the environment, which JAX reads once, as it is imported.
# ruff: noqa: E402
from absl import logging
from flax import linen as nn
import jax
import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import sentencepiece

import mod_jax
from mod_jax import config as config_lib
from mod_jax.convert import files
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import vit as convert_vit
from mod_jax.data import fingerprint, image_folder, prepared, tables, tokenizers
from mod_jax.data import prepare as prepare_lib
from mod_jax.data.images import Preprocess
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.pretrained import load as load_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.serving import chat
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'tests' / 'golden'
LIMIT = 120.0  # Seconds by the clock, of a machine that may be busy.
TEXT = 'the cat sat, naïvely; def main():\n  return 1'


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of file.

  Attributes:
    make: writes an undamaged folder.
    read: reads it, and returns arrays by name.
    flipped: globs of the files that are damaged, of any of which one is.
    hashed: whether hashes in the files vouch for what `read` returns.
  """

  make: Callable[[pathlib.Path], Any]
  read: Callable[[pathlib.Path], dict[str, Any]]
  flipped: tuple[str, ...] = ('*',)
  hashed: bool = False


def _fresh(config):
  init = jax.jit(config.build().init)
  return nn.unbox(init(jax.random.key(0), config.example()))


def _make_ours(folder):
  model = ViTConfig(
    image_size=8,
    patch_size=4,
    num_layers=2,
    width=8,
    num_heads=2,
    num_classes=2,
    routing=VisionRoutingConfig(),
  )
  pictures = Preprocess(
    image_size=8, crop_fraction=1.0, mean=(0.5,) * 3, std=(0.5,) * 3
  )
  run = mod_jax.Run(
    config=model,
    variables=_fresh(model),
    preprocess=pictures,
    classes=('cat', 'dog'),
  )
  mod_jax.export(run, folder)


def _read_ours(folder):
  run = mod_jax.load(folder)
  return {'picture': run.preprocess([np.zeros((8, 9, 3), np.uint8)])}


def _writer() -> ExperimentConfig:
  model = LMConfig(
    num_layers=1, width=8, num_heads=2, routing=MoDConfig(offset=0, period=1)
  )
  return ExperimentConfig(model=model, data=TextDataConfig(length=16))


def _make_writer(folder):
  config = _writer()
  run = mod_jax.Run(
    config=config.model,
    variables=_fresh(config.model),
    experiment=config,
    task=make_task(config),
  )
  mod_jax.export(run, folder)


def _read_writer(folder):
  load_lib.about(folder).task.modality.tokenizer.encode(TEXT)
  return {}


def _make_workdir(folder):
  text = config_lib.to_json(_writer())
  workdir_lib.write_text(folder / 'config.json', text)


def _read_workdir(folder):
  workdir_lib.read_config(folder, ExperimentConfig)
  return {}


def _make_language(folder):
  shutil.copytree(GOLDEN / 'lm' / 'llama_sharded', folder, dirs_exist_ok=True)


def _read_language(folder):
  convert_lm.max_length(folder)
  config = convert_lm.derive(folder)
  found = convert_lm.read(folder, config)
  return {name: np.asarray(array) for name, array in found.items()}


def _make_vision(suffix):
  def make(folder):
    arrays = files.read(GOLDEN / 'vit_timm.safetensors')
    files.write(folder / f'model{suffix}', arrays)

  return make


def _make_golden(name, as_name):
  def make(folder):
    shutil.copy(GOLDEN / name, folder / as_name)

  return make


def _read_vision(folder):
  (path,) = folder.glob('model.*')
  config = convert_vit.derive(path, num_heads=3)
  found = convert_vit.read(path, config)
  return {name: np.asarray(array) for name, array in found.items()}


def _read_arrays(folder):
  (path,) = folder.glob('model.*')
  return files.read(path)


def _make_foreign(folder):
  _make_ours(folder / 'ours')
  run = mod_jax.load(folder / 'ours')
  mod_jax.export(run, folder, 'huggingface', dense=True)
  shutil.rmtree(folder / 'ours')


def _read_foreign(folder):
  load_lib.about(folder).preprocess([np.zeros((8, 9, 3), np.uint8)])
  return {}


def _make_tokenizer(folder):
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(GOLDEN / 'lm_eval' / 'model' / name, folder)
  (folder / 'chat_template.jinja').write_text(
    '{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}'
  )


def _read_tokenizer(folder):
  chat.read_template(folder)
  tokenizer = tokenizers.make('huggingface', str(folder))
  tokenizer.decode(tokenizer.encode_prompt(TEXT))
  return {}


def _make_pieces(folder):
  with open(folder / 'tokenizer.model', 'wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([TEXT] * 20),
      model_writer=file,
      vocab_size=64,
      hard_vocab_limit=False,
      minloglevel=2,
    )


def _read_pieces(folder):
  tokenizer = tokenizers.make('sentencepiece', str(folder))
  tokenizer.decode(tokenizer.encode(TEXT))
  return {}


def _make_picture(form, mode='RGB'):
  def make(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (17, 23, 3), np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    image.save(folder / 'picture', form)

  return make


def _read_picture(folder):
  image = image_folder.decode(str(folder / 'picture'), 'the picture')
  return {'pixels': np.asarray(image)}


def _make_table(name):
  def make(folder):
    draw = random.Random(0)
    words = ['the', 'of', 'Ünïcode', 'mixture', 'depths', '\n']
    texts = [
      ' '.join(draw.choices(words, k=draw.randint(0, 30))) for _ in range(400)
    ]
    table = pa.table({'text': texts, 'label': list(range(400))})
    if name.endswith('.parquet'):
      checksums = name.startswith('checksums')
      parquet.write_table(table, folder / name, write_page_checksum=checksums)
      return
    if name.startswith('large'):
      large = table['text'].cast(pa.large_string())
      table = table.set_column(0, 'text', large)
    new = pa.ipc.new_file if name.startswith('file') else pa.ipc.new_stream
    zstd = pa.ipc.IpcWriteOptions(compression='zstd')
    options = zstd if name.startswith('zstd') else None
    with new(folder / name, table.schema, options=options) as writer:
      writer.write_table(table, max_chunksize=100)

  return make


def _read_table(folder):
  (path,) = folder.iterdir()
  return {'texts': np.array(list(tables.read_column(str(path), 'text')))}


# Of a small corpus, a sample sees a small part too.
_small_samples = unittest.mock.patch.object(fingerprint, '_BYTES', 2**10)


@_small_samples
def _make_corpus(folder):
  for group in ('train', 'eval'):
    (folder / group).mkdir()
    for i in range(4):
      (folder / group / f'{i}.txt').write_text(f'{group} {i} ' * 2000)
  source = TextDataConfig(
    source='files',
    files=f'{folder}/train/*.txt',
    eval_files=f'{folder}/eval/*.txt',
  )
  out = str(folder / 'corpus')
  prepare_lib.prepare(source, out, shard_bytes=2**15)


@_small_samples
def _read_corpus(folder):
  stream = prepared.open_stream(str(folder / 'corpus'), 'train')
  for thread in threading.enumerate():
    if isinstance(thread, prepared._WholeCheck):
      thread.join()
  return {'tokens': stream.read(0, len(stream))}


KINDS = {
  'mod_jax.json': Kind(_make_ours, _read_ours, ('mod_jax.json',)),
  'mod_jax.json of a language model': Kind(
    _make_writer, _read_writer, ('mod_jax.json',)
  ),
  'config.json of a run': Kind(_make_workdir, _read_workdir),
  'a language model': Kind(_make_language, _read_language),
  'config.json of vision': Kind(_make_foreign, _read_foreign, ('*.json',)),
  'safetensors': Kind(_make_vision('.safetensors'), _read_vision),
  'npz': Kind(_make_vision('.npz'), _read_arrays, hashed=True),
  'pth': Kind(_make_vision('.pth'), _read_arrays, hashed=True),
  'pth of vision': Kind(
    _make_golden('vit_dynamicvit.pth', 'model.pth'), _read_vision
  ),
  'pth of before 1.6': Kind(
    _make_golden('tensors_legacy.pth', 'model.pth'), _read_arrays
  ),
  'tokenizer.json': Kind(_make_tokenizer, _read_tokenizer),
  'SentencePiece': Kind(_make_pieces, _read_pieces),
  'png': Kind(_make_picture('PNG'), _read_picture, hashed=True),
  'png with a palette': Kind(
    _make_picture('PNG', 'P'), _read_picture, hashed=True
  ),
  'jpeg': Kind(_make_picture('JPEG'), _read_picture),
  'webp': Kind(_make_picture('WEBP'), _read_picture),
  'gif': Kind(_make_picture('GIF'), _read_picture),
  'tiff': Kind(_make_picture('TIFF'), _read_picture),
  'bmp': Kind(_make_picture('BMP'), _read_picture),
  'ppm': Kind(_make_picture('PPM'), _read_picture),
  'Arrow stream': Kind(_make_table('stream.arrow'), _read_table),
  'Arrow file': Kind(_make_table('file.arrow'), _read_table),
  'Arrow of large texts': Kind(_make_table('large.arrow'), _read_table),
  'Arrow, compressed': Kind(_make_table('zstd.arrow'), _read_table),
  'Parquet': Kind(_make_table('plain.parquet'), _read_table),
  'Parquet with checksums': Kind(
    _make_table('checksums.parquet'), _read_table, hashed=True
  ),
  'a prepared corpus': Kind(
    _make_corpus, _read_corpus, ('corpus/train-*.npy',), hashed=True
  ),
}


def draw(folder: pathlib.Path, kind: Kind, rng) -> tuple[pathlib.Path, bytes]:
  """Returns a file of an undamaged folder, and the same with flipped bits."""
  found = [p for glob in kind.flipped for p in folder.glob(glob)]
  path = rng.choice(sorted(p for p in found if p.is_file()))
  data = bytearray(path.read_bytes())
  for _ in range(rng.choice((1, 1, 1, 2, 8))):
    # Half of them where headers are, which decide most.
    end = len(data) if rng.random() < 0.5 else min(len(data), 512)
    place = rng.randrange(end)
    if rng.random() < 0.25:
      place = len(data) - 1 - place
    data[place] ^= 1 << rng.randrange(8)
  return path, bytes(data)


def attempt(kind: Kind, folder: pathlib.Path, whole: dict[str, Any]) -> str:
  """Returns how reading ends: `refused`, `accepted` or what it must not.

  Args:
    kind: of the files.
    folder: the damaged one.
    whole: what the undamaged one gives.
  """
  err = io.StringIO()
  try:
    with contextlib.redirect_stderr(err):
      found = kind.read(folder)
  except UserError:
    return 'refused'
  except BaseException:
    return f'traceback: {traceback.format_exc(limit=-6)}'
  if 'Traceback' in err.getvalue():
    return f'traceback: {err.getvalue()}'
  if kind.hashed and not (
    found.keys() == whole.keys()
    and all(np.array_equal(found[name], whole[name]) for name in whole)
  ):
    return 'silent: something else was read than the hashes are of'
  return 'accepted'


def work(connection, root: pathlib.Path) -> None:
  """Tries the cases that come through a pipe; answers how each ends."""
  logging.set_verbosity(logging.FATAL)
  whole = {}
  while (case := connection.recv()) is not None:
    name, seed = case
    kind, source = KINDS[name], root / name
    if name not in whole:
      whole[name] = kind.read(source)
    with tempfile.TemporaryDirectory(dir=root) as folder:
      folder = pathlib.Path(folder)
      shutil.copytree(source, folder, dirs_exist_ok=True)
      path, data = draw(source, kind, random.Random(seed))
      (folder / path.relative_to(source)).write_bytes(data)
      end = attempt(kind, folder, whole[name])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection.send((f'{path.name}: {end}', peak))


class Worker:
  """A process that tries cases, and is begun anew when one has ended it."""

  def __init__(self, root):
    self.root = root
    self.case = None
    self.begin()

  def begin(self):
    context = multiprocessing.get_context('spawn')
    self.pipe, other = context.Pipe()
    self.process = context.Process(target=work, args=(other, self.root))
    self.process.start()
    other.close()

  def give(self, case):
    self.case = case
    self.pipe.send(case)

  def take(self) -> tuple[str, int]:
    """Returns how the case has ended, and the process's most memory, in KiB."""
    try:
      if self.pipe.poll(LIMIT):
        return self.pipe.recv()
      end = 'hang'
    except EOFError:
      end = 'crash'
    self.process.kill()
    self.process.join()
    end = f': {end} ({self.process.exitcode})'
    self.begin()
    return end, 0


def fuzz(count: int, seed: int, workers: int) -> bool:
  """Tries so many cases, and returns whether all ended as they should."""
  with tempfile.TemporaryDirectory() as root:
    root = pathlib.Path(root)
    for name, kind in KINDS.items():
      (root / name).mkdir()
      kind.make(root / name)
    names = list(KINDS)
    cases = [(names[i % len(names)], f'{seed}/{i}') for i in range(count)]
    ends = collections.defaultdict(collections.Counter)
    pool = [Worker(root) for _ in range(workers)]
    most = 0
    while cases or any(worker.case for worker in pool):
      for worker in pool:
        if worker.case is not None:
          told, peak = worker.take()
          (name, drawn), worker.case = worker.case, None
          most = max(most, peak)
          end = told.partition(': ')[2].split(':')[0].split(' (')[0]
          ends[name][end] += 1
          if end not in ('refused', 'accepted'):
            print(f'{name} {drawn} {told[-3000:]}', flush=True)
        if cases:
          worker.give(cases.pop(0))
    for worker in pool:
      worker.pipe.send(None)
      worker.process.join()
  for name, counts in ends.items():
    told = ', '.join(f'{n} {end}' for end, n in sorted(counts.items()))
    print(f'{name}: {told}')
  total = sum(ends.values(), collections.Counter())
  told = ', '.join(f'{n} {end}' for end, n in sorted(total.items()))
  print(f'{count} cases: {told}; most memory {most / 2**20:.1f} GiB')
  return set(total) <= {'refused', 'accepted'}


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--count', type=int, default=5000)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--workers', type=int, default=2)
  args = parser.parse_args()
  sys.exit(not fuzz(args.count, args.seed, args.workers))


if __name__ == '__main__':
  main()
