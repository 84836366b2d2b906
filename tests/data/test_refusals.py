"""What is refused, by one sentence that names the offender and a way out."""

import io
import pathlib
import struct

from batch_checks import take
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import pytest

from mod_jax import errors
from mod_jax.data import (
  image_folder,
  images,
  prepare,
  text,
  tokenizers,
)
from mod_jax.data.augment import AugmentConfig
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig

PREPARED = {'source': 'prepared', 'path': 'x'}
TABLES = {'source': 'huggingface', 'files': 'x'}
TFDS = {'source': 'tfds', 'name': 'x'}

# But for single numbers and choices: test_configs.py has those of all fields.
FIELDS = [
  (ImageDataConfig, {'source': 'folder'}, "source='folder' needs path"),
  (ImageDataConfig, TFDS | {'eval_split': ''}, 'needs eval_split'),
  (ImageDataConfig, {'name': 'a'}, "name='a' is read only .*'tfds'.* drop"),
  (ImageDataConfig, {'cache_dir': 'a'}, "cache_dir='a', cache='memory'"),
  (TextDataConfig, {'prefetch': 2, 'read_threads': 3}, 'prefetch=2, read_th'),
  (TextDataConfig, {'source': 'files'}, "source='files', files=''"),
  (TextDataConfig, {'files': 'a'}, "files='a' is read only .* drop files"),
  (TextDataConfig, PREPARED | {'path': 'gs://x'}, "path='gs://x' is a URL"),
  (
    TextDataConfig,
    PREPARED | {'tokenizer': 'huggingface', 'tokenizer_path': 'm'},
    "tokenizer_path='m'.*source='prepared'.* drop tokenizer_path",
  ),
  (TextDataConfig, {'tokenizer_path': 'm'}, "='m', tokenizer='bytes'.* drop"),
  (TextDataConfig, {'tokenizer': 'huggingface'}, "tokenizer_path=''"),
  (TextDataConfig, TABLES | {'tokenizer': 'bpe'}, "'bpe'.*a tokenizer file"),
]


def check(message, call, *args, **kwargs):
  with pytest.raises(errors.UserError, match=message) as info:
    call(*args, **kwargs)
  # Grain adds a note of its own to what is raised while it reads.
  assert '\n' not in str(info.value).partition('\n-----')[0]


@pytest.mark.parametrize(('config', 'fields', 'message'), FIELDS)
def test_fields(config, fields, message):
  check(message, config, **fields)


# Text.


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """Ten training files of 44 bytes, two held out, and what is no text."""
  root = tmp_path_factory.mktemp('texts')
  for folder, count in (('train', 10), ('eval', 2)):
    (root / folder).mkdir()
    for i in range(count):
      (root / folder / f'{i}.txt').write_text(f'{folder}{i}' * 6 + 'x' * 8)
  (root / 'empty.txt').write_text('')
  (root / 'tiny.md').write_text('x')
  (root / 'bad.parquet').write_text('text')
  return root


def read_text(batch_size=1, evaluate=False, **fields):
  config = TextDataConfig(source='files', **fields)
  if evaluate:
    text.eval_batches(config, batch_size=batch_size)
  else:
    next(text.train_iterator(config, batch_size=batch_size, seed=0))


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    ({'files': 'none/*'}, r'files=.*none/\*.*matches no file'),
    ({'files': '.'}, r"files='\.'.* is a directory, so write"),
    ({'files': 'empty.txt'}, 'only empty files'),
    ({'files': 'eval/*'}, 'also held out .*: give eval_files other'),
    ({'length': 500}, '0 rows of length=500, .*: add text or lower'),
    ({'batch_size': 99}, 'fewer than the 99 of one batch'),
    (
      {'evaluate': True, 'eval_files': 'tiny.md'},
      '1 tokens, too few.*hold out',
    ),
    (
      {'evaluate': True, 'files': 'tiny.md', 'eval_files': ''},
      'no file is held out.*: set eval_files',
    ),
    ({'cache_dir': 'tiny.md'}, 'tiny.md.*cannot hold the token cache'),
    (
      {'tokenizer': 'bpe', 'tokenizer_vocab_size': 5000},
      'tokenizer_vocab_size=5000: the 10 training files have only',
    ),
  ],
)
def test_files_of_text(texts, tmp_path, monkeypatch, kwargs, message):
  monkeypatch.chdir(texts)
  usual = {
    'files': 'train/*',
    'eval_files': 'eval/*',
    'length': 16,
    'cache_dir': str(tmp_path),
  }
  check(message, read_text, **usual | kwargs)


@pytest.mark.parametrize('kind', ['sentencepiece', 'huggingface'])
def test_tokenizer_files(kind, tmp_path):
  said = 'tokenizer_path=.*nothere.*no file.*give'
  check(said, tokenizers.make, kind, f'{tmp_path}/nothere')
  check('no file.*tokenizer', tokenizers.make, kind, str(tmp_path))
  bad = tmp_path / 'bad'
  for content in (b'', b'{}', b'\x00\x01 no model'):
    bad.write_bytes(content)
    check('is not a readable.*check', tokenizers.make, kind, str(bad))


def test_a_tokenizer_with_a_huge_id(tmp_path):
  """A small file would become large: memory grows with the largest id."""
  file = tmp_path / 'tokenizer.json'
  file.write_text(
    '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel",'
    ' "vocab": {"a": 0, "b": 2147483647}, "unk_token": "a"}}'
  )
  message = 'the id 2147483647; expected less'
  check(message, tokenizers.make, 'huggingface', str(file))


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    # Names are told apart by the code that does it for pictures, too.
    ({'tfds_name': 'lm1bb'}, "'lm1bb' is neither.*Did you mean 'lm1b'"),
    ({'tfds_split': 'nope'}, "'nope' of.*choose from blank, test, train"),
    ({'tfds_text_key': 'body'}, "'body' is not in.*have n, text"),
    ({'tfds_text_key': 'n'}, 'not text'),
    ({'text_column': 'body'}, "'body' is not in .*, which has text, n"),
    ({'text_column': 'n'}, 'holds int64, not text: choose another of text, n'),
    ({'files': 'bad.parquet'}, 'cannot be read as Arrow or Parquet'),
  ],
)
def test_documents(
  texts, tfds_documents, tmp_path, monkeypatch, fields, message
):
  monkeypatch.chdir(texts)
  parquet.write_table(pa.table({'text': ['a'] * 3, 'n': [1] * 3}), 'a.parquet')
  usual = {'source': 'huggingface', 'files': 'a.parquet'}
  if 'tfds' in str(fields):
    usual = {'source': 'tfds', 'tfds_name': tfds_documents}
    usual['tfds_dir'] = str(tmp_path)
  config = TextDataConfig(**usual | fields)
  check(message, prepare.prepare, config, str(tmp_path / 'out'))


def test_another_corpus_in_the_directory(texts, tmp_path):
  def make(out=tmp_path / 'out', shard_bytes=2**20, **fields):
    usual = {'source': 'files', 'files': f'{texts}/train/*'}
    config = TextDataConfig(**usual | fields)
    prepare.prepare(config, str(out), shard_bytes=shard_bytes)

  make()
  check('made otherwise.*config.eval_fraction', make, eval_fraction=0.5)
  check('made otherwise.*shard_bytes', make, shard_bytes=2**10)
  prepared = {'source': 'prepared', 'path': str(tmp_path / 'out'), 'files': ''}
  check('is prepared already', make, out=tmp_path / 'other', **prepared)


# Pictures.


def picture(kind='PNG', size=(4, 4), cut=None):
  file = io.BytesIO()
  Image.new('RGB', size, (9, 99, 9)).save(file, kind)
  return file.getvalue()[:cut]


def huge():
  header = bytearray(picture('BMP'))
  header[18:26] = struct.pack('<ii', 20_000, 5_001)
  return bytes(header)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (picture('EPS'), 'no picture in'),  # A format that would run a program.
    (huge(), '20,000 x 5,001 pixels, and at'),
  ],
)
def test_pictures_that_are_not_decoded(content, message):
  check(message, image_folder.decode, content, 'x')


@pytest.mark.parametrize(
  ('files', 'split', 'message'),
  [
    ('a/1 a/2', 'train', "a folder for each of two classes.* which has 'a'"),
    ('val/a/1 test/a/1', 'train', "'test', 'val' but no train/"),
    ('a/1 b/1 c/bad', 'skip', "3 classes, 1 have no pictures.*'c'"),
    ('train/a/1 train/b/1 val/x.txt', 'eval', 'no pictures: add some, or rem'),
    ('a/1 b/1', 'eval', 'one picture per class, so that none can be held out'),
    (
      'train/cat/1 train/dog/1 val/cats/1 val/dog/1',
      *('eval', "'cats', which.*lacks.*Did you mean 'cat'"),
    ),
  ],
)
def test_folders(tmp_path, files, split, message):
  for name in files.split():
    path = tmp_path / (name if name.endswith('.txt') else f'{name}.png')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'' if 'bad' in name else picture())

  def read():
    image_folder.open_split(
      str(tmp_path),
      'eval' if split == 'eval' else 'train',
      eval_fraction=0.3,
      unreadable='skip' if split == 'skip' else 'refuse',
    )

  check(message, read)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Two classes of two pictures each, one to train on, and all cut off."""
  root = tmp_path_factory.mktemp('pictures')
  for name in ('train/a/1', 'train/a/2', 'train/b/1', 'train/b/2'):
    path = root / f'{name}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(size=(64, 64), cut=-60))
  return root


@pytest.mark.parametrize(
  ('fields', 'batch_size', 'message'),
  [
    ({}, 5, '2 pictures to train on, fewer than the 5 of one batch'),
    ({'augment': AugmentConfig(mixup=1.0)}, 1, 'batch_size=1: mixup and .*set'),
    ({'unreadable': 'skip'}, 1, 'none of the 2 pictures to train on'),
    ({'path': 'nothere'}, 1, "nothere' is no directory"),
    (
      {'cache': 'disk', 'cache_dir': 'README.md/kept'},
      *(1, 'cache_dir=.*cannot hold pictures'),
    ),
  ],
)
def test_batches_of_pictures(folder, monkeypatch, fields, batch_size, message):
  monkeypatch.chdir(pathlib.Path(__file__).parents[2])
  config = ImageDataConfig(**{'source': 'folder', 'path': str(folder)} | fields)

  def read():
    next(images.train_iterator(config, batch_size=batch_size, seed=0))

  check(message, read)


@pytest.mark.parametrize(
  ('name', 'fields', 'message'),
  [
    ('cars_196', {}, "neither.*Did you mean 'cars196'"),
    ('oxford_flowers102', {}, 'not prepared.*download_and_prepare'),
    ('Arrays', {'train_split': 'nope'}, "'nope' of.*train, validation"),
    ('Floats', {}, r"'image' of.*is float32 \[4, 6, 3\]"),
    ('Unlabelled', {}, "no feature 'label', only image, n"),
    ('Hidden', {}, 'label -1, outside of 0..2: choose a split'),
    (
      *('Files', {'train_split': 'validation'}),
      "record . of split 'validation'.*cannot be decoded",
    ),
  ],
)
def test_tfds_of_pictures(tfds_pictures, tmp_path, name, fields, message):
  config = ImageDataConfig(
    source='tfds',
    name=tfds_pictures.get(name, name),
    data_dir=str(tmp_path),
    **fields,
  )

  def read():
    take(images.train_iterator(config, batch_size=1, seed=0), 9)

  check(message, read)
