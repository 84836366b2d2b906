"""A subword tokeniser that a run makes itself, from its own training files."""

from collections.abc import Iterator, Sequence
import pathlib

import tokenizers as hf_tokenizers

from mod_jax import errors, paths
from mod_jax.data import corpus

END_OF_TEXT = '<|endoftext|>'
# Bytes of text that merges are learned from. More would hardly change them,
# and would let a large corpus hold up the start of a run.
_MAX_BYTES = 2**26


def open_tokenizer(
  files: Sequence[corpus.TextFile], vocab_size: int, cache_dir: str
) -> pathlib.Path:
  """Returns a `tokenizer.json` learned from files, now or in an earlier run.

  A byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), so that any text
  has tokens and comes back unchanged. It is a function of the files and the
  size alone; the cache is keyed by the files' names, sizes and times of change.

  Args:
    files: training files only: what is held out must not shape the vocabulary.
    vocab_size: ids, the 256 bytes and the end of a text among them.
    cache_dir: directory for the result; made if missing.

  Raises:
    errors.UserError: the files are too few for so many subwords, or a file or
      the directory cannot be used.
  """
  key = f'bpe-1-{vocab_size}-{corpus.listing_digest(files)}'
  path = pathlib.Path(cache_dir) / f'{key[:40]}.tokenizer.json'
  if path.is_file():
    return path
  tokenizer = hf_tokenizers.Tokenizer(hf_tokenizers.models.BPE())
  tokenizer.pre_tokenizer = hf_tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = hf_tokenizers.decoders.ByteLevel()
  tokenizer.train_from_iterator(
    _sample(files),
    hf_tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[END_OF_TEXT],
      # All bytes, so that no text is without tokens.
      initial_alphabet=hf_tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  if tokenizer.get_vocab_size() < vocab_size:
    raise errors.UserError(
      f'tokenizer_vocab_size={vocab_size}: the {len(files)} training files have'
      f' only {tokenizer.get_vocab_size()} different subwords; lower it, or add'
      ' text.'
    )
  try:
    paths.write_bytes(path, tokenizer.to_str().encode())
  except OSError as e:
    raise errors.UserError(
      f'cache_dir={cache_dir!r} cannot hold the tokenizer: {e.strerror}; choose'
      ' a writable directory.'
    ) from e
  return path


def _sample(files: Sequence[corpus.TextFile]) -> Iterator[str]:
  """Yields the text of files, drawn by a hash of their names, up to a limit."""
  left = _MAX_BYTES
  for file in sorted(files, key=lambda f: corpus.draw(f.name)):
    for text in corpus.text_chunks(file.path):
      yield text
      left -= len(text.encode())
      if left < 0:
        return
