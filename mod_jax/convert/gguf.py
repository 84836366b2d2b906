"""Reads GGUF, llama.cpp's files of a language model with its tokenizer.

A GGUF file holds what Hugging Face has in a folder: `unpack` writes the config
and tokenizer as such a folder, and `stored` reads the weights, with Hugging
Face's names.
"""

import functools
import hashlib
import os
import pathlib
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mod_jax import paths
from mod_jax.convert import files
from mod_jax.convert.files import Lazy
from mod_jax.errors import UserError
from mod_jax.layers import rope

_MAGIC = b'GGUF'
# Directory of the unpacked folders, each named by a hash of its contents.
_CACHE = '~/.cache/mod_jax/gguf'
# Maps the metadata's names, without the prefix of the architecture, to those in
# `config.json`.
_FIELDS = {
  'block_count': 'num_hidden_layers',
  'embedding_length': 'hidden_size',
  'feed_forward_length': 'intermediate_size',
  'attention.head_count': 'num_attention_heads',
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.key_length': 'head_dim',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'attention.sliding_window': 'sliding_window',
  'attention.causal': 'is_causal',
  'context_length': 'max_position_embeddings',
  'rope.freq_base': 'rope_theta',
}
# Maps GGUF's names of modules to Hugging Face's; `{}` is a block's number.
_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
  'blk.{}.attn_norm': 'model.layers.{}.input_layernorm',
  'blk.{}.attn_q': 'model.layers.{}.self_attn.q_proj',
  'blk.{}.attn_k': 'model.layers.{}.self_attn.k_proj',
  'blk.{}.attn_v': 'model.layers.{}.self_attn.v_proj',
  'blk.{}.attn_q_norm': 'model.layers.{}.self_attn.q_norm',
  'blk.{}.attn_k_norm': 'model.layers.{}.self_attn.k_norm',
  'blk.{}.attn_output': 'model.layers.{}.self_attn.o_proj',
  'blk.{}.ffn_norm': 'model.layers.{}.post_attention_layernorm',
  'blk.{}.ffn_gate': 'model.layers.{}.mlp.gate_proj',
  'blk.{}.ffn_up': 'model.layers.{}.mlp.up_proj',
  'blk.{}.ffn_down': 'model.layers.{}.mlp.down_proj',
}
_ROPE_FACTORS = 'rope_freqs.weight'
# Supported architectures. GGUF counts Mistral's models as `llama`.
_ARCHITECTURES = ('llama', 'qwen2', 'qwen3')
# Regular expressions and pre-tokenizers that split texts before byte pairs are
# merged; `_SPLITS` has them by `tokenizer.ggml.pre`.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
  rf'{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{%s}}'
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_SPLITS = {
  'gpt-2': None,
  'smollm': pre_tokenizers.Digits(individual_digits=True),
  'llama-bpe': _WORDS % '1,3',
  'smaug-bpe': _WORDS % '1,3',  # With merges, and without a begin token.
  'qwen2': _WORDS % '1',
}
# Other names in llama.cpp for the same splits, of models of `_ARCHITECTURES`.
_SAME = {
  **dict.fromkeys(('llama3', 'llama-v3', 'falcon3', 'pixtral'), 'llama-bpe'),
  **{'midm-2.0': 'llama-bpe', 'deepseek-r1-qwen': 'qwen2'},
  **dict.fromkeys(('refact', 'minerva-7b'), 'smollm'),
  **dict.fromkeys(('mellum', 'trillion', 'a.x-4.0'), 'gpt-2'),
}
# Tokens after which llama.cpp stops, also where the metadata do not name them.
_ENDS = (
  *('<|eot_id|>', '<|eom_id|>', '<|im_end|>', '<|end|>', '<end_of_turn>'),
  *('<|endoftext|>', '<|end_of_text|>', '<EOT>'),
)
# Kinds of tokens in `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def is_gguf(path: str | os.PathLike) -> bool:
  """Returns whether a path is a GGUF file."""
  path = pathlib.Path(path).expanduser()
  if not path.is_file():
    return False
  with open(path, 'rb') as file:
    return file.read(len(_MAGIC)) == _MAGIC


def unpack(path: str | os.PathLike) -> pathlib.Path:
  """Writes the config and tokenizer in a GGUF file as Hugging Face's files.

  Returns their directory, in `_CACHE`; it holds no weights.
  """
  metadata = _Metadata(path)
  config = _config(path, metadata)
  try:
    tokenizer, beside = _tokenizer(path, metadata)
  except UserError:
    raise
  except Exception as error:  # `tokenizers` raises no narrower type.
    raise UserError(
      f'{path}: its metadata make no tokenizer ({error}): fetch it again.'
    ) from error
  told = (
    metadata.get(f'tokenizer.ggml.{end}_token_id')
    for end in ('eos', 'eot', 'eom')
  )
  ends = dict.fromkeys((*told, *map(tokenizer.token_to_id, _ENDS)))
  ends = [int(end) for end in ends if end is not None]
  # For exports of the model: without these, transformers uses default ids.
  config |= {
    'bos_token_id': metadata.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': ends if len(ends) > 1 else next(iter(ends), None),
  }
  text = tokenizer.to_str()
  digest = hashlib.sha256(repr((config, beside, text)).encode()).hexdigest()
  folder = pathlib.Path(_CACHE).expanduser() / digest[:20]
  if not (folder / 'config.json').is_file():
    paths.write_bytes(folder / 'tokenizer.json', text.encode())
    files.write_json(folder / 'tokenizer_config.json', beside)
    # Written last: if this file exists, the other files are complete.
    files.write_json(folder / 'config.json', config)
  return folder


def stored(path: str | os.PathLike) -> dict[str, Lazy]:
  """Returns a file's weights by Hugging Face's names, read lazily."""
  reader, metadata = _reader(path), _Metadata(path)
  heads = {}
  if metadata['general.architecture'] == 'llama':
    of_query = metadata['llama.attention.head_count']
    of_key = metadata.get('llama.attention.head_count_kv', of_query)
    heads = {'attn_q': of_query, 'attn_k': of_key}
  arrays = {}
  for tensor in reader.tensors:
    if tensor.name != _ROPE_FACTORS:
      module, _, suffix = tensor.name.rpartition('.')
      arrays[f'{_theirs(path, module)}.{suffix}'] = Lazy(
        # GGUF's shapes begin with the contiguous axis, NumPy's end with it.
        tuple(int(size) for size in reversed(tensor.shape)),
        functools.partial(
          _read, path, tensor, heads.get(module.rpartition('.')[2])
        ),
      )
  return arrays


def _theirs(path, module: str) -> str:
  number = next((part for part in module.split('.') if part.isdecimal()), '')
  name = module.replace(f'.{number}.', '.{}.') if number else module
  if name not in _NAMES:
    raise UserError(
      f'{path}: {module} is no part of a model that is known here; expected'
      f' {", ".join(_ARCHITECTURES)}.'
    )
  return _NAMES[name].format(number)


def _read(path, tensor, heads: int | None) -> np.ndarray:
  import gguf

  try:
    array = gguf.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise UserError(
      f'{path}: {tensor.name} is quantised as {tensor.tensor_type.name}, which'
      ' the package gguf does not decode: take another file of the model, such'
      ' as Q8_0 or F16.'
    ) from error
  array = np.asarray(array, np.float32)
  files.check_finite(array, path, tensor.name)
  if heads is not None:
    # Pairs of channels that are rotated together are adjacent in GGUF. In
    # Hugging Face's order, each half of a head has one channel of every pair.
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    array = pairs.swapaxes(1, 2).reshape(array.shape)
  return array


def _reader(path):
  """Returns a file's `GGUFReader`; keeps the latest until its file changes."""
  path = os.path.expanduser(path)
  about = os.stat(path)
  return _read_header(path, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_header(path, size, changed):
  try:
    import gguf
  except ImportError as error:
    raise UserError(
      f"{path}: GGUF needs {error.name}: pip install 'mod_jax[gguf]'."
    ) from error
  try:
    return gguf.GGUFReader(path)
  except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
    raise UserError(
      f'{path} is damaged, or no GGUF of version 2 or 3: fetch it again'
      f' ({error}).'
    ) from error


class _Metadata:
  """The metadata of a file; each value is decoded when it is read."""

  def __init__(self, path):
    self._path, self._fields = path, _reader(path).fields

  def __contains__(self, key: str) -> bool:
    return key in self._fields

  def __getitem__(self, key: str) -> Any:
    if key not in self._fields:
      raise UserError(
        f'{self._path} has no {key}, so it is damaged or holds no language'
        ' model: fetch it again.'
      )
    return self._fields[key].contents()

  def get(self, key: str, default: Any = None) -> Any:
    if key not in self:
      return default
    return self[key]


def _config(path, metadata: _Metadata) -> dict[str, Any]:
  """Returns the fields of a `config.json` for the model in a GGUF file."""
  if metadata.get('split.count', 1) > 1:
    raise UserError(
      f'{path} is one of several parts of a model: join them by llama.cpp, with'
      ' llama-gguf-split --merge, and give the whole file.'
    )
  architecture = metadata.get('general.architecture')
  if architecture not in _ARCHITECTURES:
    raise UserError(
      f'{path}: architecture {architecture!r} is not known here; expected'
      f' {", ".join(_ARCHITECTURES)}.'
    )
  fields = {
    theirs: metadata[f'{architecture}.{ours}']
    for ours, theirs in _FIELDS.items()
    if f'{architecture}.{ours}' in metadata
  }
  fields.setdefault('num_key_value_heads', fields.get('num_attention_heads'))
  if metadata.get(f'{architecture}.expert_count'):
    fields['num_experts'] = metadata[f'{architecture}.expert_count']
  if architecture == 'llama' and fields.get('sliding_window'):
    architecture = 'mistral'
  if (scaling := _rope_scaling(path, metadata)) is not None:
    fields['rope_scaling'] = scaling
  shapes = {tensor.name: tensor.shape for tensor in _reader(path).tensors}
  if 'token_embd.weight' not in shapes:
    raise UserError(
      f'{path} holds no embeddings: give a file with the weights of a model,'
      ' and not a vocabulary alone.'
    )
  return fields | {
    'model_type': architecture,
    'architectures': [f'{architecture.capitalize()}ForCausalLM'],
    'vocab_size': int(shapes['token_embd.weight'][-1]),
    'tie_word_embeddings': 'output.weight' not in shapes,
  }


def _rope_scaling(path, metadata) -> dict[str, Any] | None:
  architecture = metadata['general.architecture']
  prefix = f'{architecture}.rope.scaling'
  # Older files have no type, and the factor under either of two names.
  old = metadata.get(f'{architecture}.rope.scale_linear')
  factor = metadata.get(f'{prefix}.factor', old)
  kind = metadata.get(f'{prefix}.type', 'linear')
  if kind not in ('none', 'linear'):
    raise UserError(
      f'{path}: rotary positions scaled by {kind!r} are not supported; expected'
      ' none or linear.'
    )
  linear = factor if factor and kind == 'linear' else 1.0
  factors = [x for x in _reader(path).tensors if x.name == _ROPE_FACTORS]
  if not factors:
    return None if linear == 1 else {'rope_type': kind, 'factor': linear}
  # Files of Llama 3.1 and 3.2 have a factor for each frequency, but not the
  # settings that these are computed from: find the settings that give them.
  head_dim = 2 * len(factors[0].data)
  theta = metadata[f'{architecture}.rope.freq_base']
  for factor in (8.0, 32.0):
    scaling = rope.RopeScaling(
      kind='llama3',
      factor=factor,
      low_frequency=1.0,
      high_frequency=4.0,
      original_length=8192,
    )
    frequency_C = rope.frequencies(head_dim, theta)
    expected = frequency_C / scaling.scaled(frequency_C)
    if np.allclose(linear * factors[0].data, expected, rtol=1e-3):
      return {
        **{'rope_type': 'llama3', 'factor': factor, 'low_freq_factor': 1.0},
        **{'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192},
      }
  raise UserError(
    f'{path}: {_ROPE_FACTORS} with the scaling beside it is not that of Llama'
    ' 3.1 or 3.2, the only ones that are known here.'
  )


def _tokenizer(path, metadata) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  """Returns the tokenizer, and the fields of a `tokenizer_config.json`."""
  prefix = 'tokenizer.ggml'
  kind, tokens = metadata.get(f'{prefix}.model'), metadata[f'{prefix}.tokens']
  vocab = {token: i for i, token in enumerate(tokens)}
  if kind == 'gpt2':
    tokenizer = _byte_pairs(path, vocab, metadata)
  elif kind == 'llama':
    tokenizer = _sentence_pieces(vocab, metadata)
  else:
    raise UserError(
      f'{path}: its tokenizer is of the kind {kind!r}; expected gpt2 or llama.'
    )
  types = metadata.get(f'{prefix}.token_type', [])
  for token, type_ in zip(tokens, types, strict=False):
    if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED):
      special = type_ != _USER_DEFINED
      added = tokenizers.AddedToken(token, special=special, normalized=False)
      tokenizer.add_tokens([added])
  beside = {
    f'{name}_token': tokens[metadata[f'{prefix}.{key}_token_id']]
    for name, key in (('bos', 'bos'), ('eos', 'eos'), ('unk', 'unknown'))
    if f'{prefix}.{key}_token_id' in metadata
  }
  # Texts of Llama 3 begin with this token, but its files lack `add_bos_token`.
  customary = kind == 'llama' or _split(metadata) == 'llama-bpe'
  begins = metadata.get(f'{prefix}.add_bos_token', customary)
  if begins and 'bos_token' in beside:
    bos = beside['bos_token']
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f'{bos} $A',
      pair=f'{bos} $A {bos} $B',
      special_tokens=[(bos, vocab[bos])],
    )
  if 'tokenizer.chat_template' in metadata:
    beside['chat_template'] = metadata['tokenizer.chat_template']
  return tokenizer, beside


def _split(metadata) -> str:
  # Without a name, llama.cpp warns, and splits by rules of no model.
  name = metadata.get('tokenizer.ggml.pre', 'default')
  return _SAME.get(name, name)


def _byte_pairs(path, vocab, metadata) -> tokenizers.Tokenizer:
  split = _split(metadata)
  if split not in _SPLITS:
    raise UserError(
      f'{path}: its tokenizer splits texts by {split!r}; expected one of'
      f' {", ".join(_SPLITS)}. Older files do not say how, which is the'
      ' default: take a newer file of the model.'
    )
  merges = metadata.get('tokenizer.ggml.merges', [])
  merges = [tuple(merge.split(' ')) for merge in merges]
  # Llama 3 merges nothing in a word that is in the vocabulary as a whole.
  model = models.BPE(vocab, merges, ignore_merges=split == 'llama-bpe')
  tokenizer = tokenizers.Tokenizer(model)
  first, by_words = _SPLITS[split], False
  if isinstance(first, str):
    pattern, by_words = tokenizers.Regex(first), True
    first = pre_tokenizers.Split(pattern, 'isolated')
  byte_level = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=not by_words
  )
  steps = [byte_level] if first is None else [first, byte_level]
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
  tokenizer.decoder = decoders.ByteLevel()
  if split == 'qwen2':
    tokenizer.normalizer = normalizers.NFC()
  return tokenizer


def _sentence_pieces(vocab, metadata) -> tokenizers.Tokenizer:
  """Returns a tokenizer that merges pairs by score, as SentencePiece does."""
  scores = metadata['tokenizer.ggml.scores']
  types = metadata.get('tokenizer.ggml.token_type', [_NORMAL] * len(scores))
  merges = []
  for token, i in vocab.items():
    if types[i] not in (_NORMAL, _USER_DEFINED):
      continue  # Merges of text must not give a control or byte token.
    for cut in range(1, len(token)):
      pair = token[:cut], token[cut:]
      if all(part in vocab for part in pair):
        merges.append((-scores[i], vocab[pair[0]], vocab[pair[1]], pair))
  unknown = metadata.get('tokenizer.ggml.unknown_token_id', 0)
  model = models.BPE(
    vocab,
    [pair for *_, pair in sorted(merges)],
    unk_token=metadata['tokenizer.ggml.tokens'][unknown],
    fuse_unk=True,
    byte_fallback=True,
  )
  tokenizer = tokenizers.Tokenizer(model)
  steps = [normalizers.Replace(' ', '▁')]
  undo = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  if metadata.get('tokenizer.ggml.add_space_prefix', True):
    steps.insert(0, normalizers.Prepend('▁'))
    undo.append(decoders.Strip(' ', 1, 0))
  tokenizer.normalizer = normalizers.Sequence(steps)
  tokenizer.decoder = decoders.Sequence(undo)
  return tokenizer
