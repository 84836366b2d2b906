"""Learns a byte-level BPE tokeniser from training files."""

from collections.abc import Iterator, Sequence
import pathlib

import tokenizers as hf_tokenizers

from mod_jax import errors, paths
from mod_jax.data import corpus

# Bytes of text from which merges are learned. More text would hardly change the
# merges and would delay the start of a run.
_MAX_BYTES = 2**26


def open_tokenizer(
  files: Sequence[corpus.TextFile], vocab_size: int, cache_dir: str
) -> pathlib.Path:
  """Returns the path of a `tokenizer.json`; learns it if it is not cached.

  It is a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), which
  encodes any text without loss. It depends only on the files and the size; the
  cache is keyed by the files' paths, names, sizes and modification times.
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
      special_tokens=['<|endoftext|>'],
      # Include all bytes, so that any text can be encoded.
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
  """Yields text of the files by hashed name, up to about `_MAX_BYTES`."""
  remaining = _MAX_BYTES
  for file in sorted(files, key=lambda f: corpus.draw(f.name)):
    for chunk in corpus.chunks(file.path):
      yield chunk.decode('utf-8', 'replace')
      remaining -= len(chunk)
      if remaining < 0:
        return
