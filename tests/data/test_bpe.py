"""A tokenizer that a run learns from its own training files."""

import os
import pathlib

import pytest

from mod_jax.data import text

WORDS = ['routed', 'blocks', 'take', 'some', 'of', 'tokens', 'naïve', '東京']


def write_files(root):
  for i in range(6):
    words = ' '.join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 80))
    (root / f'{i}.txt').write_text(words)
  (root / 'held.md').write_text('zebra zebra zebra zebra')


def config_of(root, **kwargs):
  kwargs = {
    'source': 'files',
    'files': f'{root}/*.txt',
    'eval_files': f'{root}/*.md',
    'tokenizer': 'bpe',
    'tokenizer_vocab_size': 280,
    'cache_dir': f'{root}/cache',
    'length': 8,
    **kwargs,
  }
  return text.TextDataConfig(**kwargs)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  root = tmp_path_factory.mktemp('texts')
  write_files(root)
  return root


@pytest.fixture(scope='module')
def tokenizer(root):
  return text.make_tokenizer(config_of(root))


def test_learned_from_the_training_files(root, tokenizer, tmp_path):
  assert tokenizer.vocab_size == 280
  # Of the words it has seen, each is fewer tokens than bytes.
  assert len(tokenizer.encode('routed')) < 6
  assert len(tokenizer.encode('zebra')) == 5  # Held out: it learned nothing.
  # A function of the files: another cache gets the same bytes.
  again = config_of(root, cache_dir=str(tmp_path))
  first, second = map(text.learn_tokenizer, (config_of(root), again))
  assert first != second
  assert first.read_bytes() == second.read_bytes()


def test_cached_until_a_file_changes(tmp_path):
  write_files(tmp_path)
  config = config_of(tmp_path)
  path = text.learn_tokenizer(config)
  path.write_text('found in the cache')
  assert text.learn_tokenizer(config) == path
  file = tmp_path / '0.txt'
  file.write_text(file.read_text().replace('routed', 'sorted'))
  os.utime(file, ns=(1, 1))
  assert text.learn_tokenizer(config) != path
  assert not list(pathlib.Path(config.cache_dir).glob('*.tmp'))


def test_documents_end_with_its_end_token(root, tokenizer):
  config = config_of(root, segments=True)
  (batch,) = text.eval_batches(config, batch_size=4)
  ids = tokenizer.encode('zebra zebra zebra zebra')
  valid = batch['weights'] > 0
  assert batch['targets'][valid].tolist() == [*ids[1:], tokenizer.eos_id]
