"""Language models of Hugging Face: Llama, Mistral, Qwen2 and Qwen3.

A directory as `transformers` writes it: `config.json`, the weights in
safetensors, one file or several, and the tokenizer's files. `derive` reads the
first, `read` the second; `save` writes both. Rotary channels lie in halves
there as here, so nothing is permuted.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
import pathlib
import re
from typing import Any

from absl import logging
from flax import linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mod_jax import paths
from mod_jax import trees
from mod_jax.convert import files
from mod_jax.convert.entry import Entry
from mod_jax.convert.entry import Lazy
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import UserError
from mod_jax.layers.rope import RopeScaling
from mod_jax.models import lm
from mod_jax.models.lm import LMConfig

FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3')
# Keys that would change what the model computes, and what they must be.
_MUST_BE = {
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'partial_rotary_factor': (1, 1.0),
  'quantization_config': (),
  'attn_logit_softcapping': (),
  'final_logit_softcapping': (),
  'logit_scale': (1, 1.0),
  'embedding_multiplier': (1, 1.0),
  'residual_multiplier': (1, 1.0),
  'attention_multiplier': (),
  'num_local_experts': (),
  'num_experts': (),
}
_SCALINGS = ('default', 'linear', 'llama3')
# Tensors of old files that can be computed.
_USELESS = r'.*\.rotary_emb\.inv_freq'
# Bytes of a file of weights that are written at most, as Hugging Face does.
_SHARD = 5 * 10**9
# What of a directory belongs to its tokenizer and to how one generates.
BESIDE = (
  'tokenizer.json',
  'tokenizer.model',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'chat_template.json',
  'generation_config.json',
)
_DTYPES = {
  'F64': np.float64,
  'F32': np.float32,
  'F16': np.float16,
  'BF16': ml_dtypes.bfloat16,
}


def holds_model(path: str | os.PathLike) -> bool:
  """Whether a path is the directory of a language model, of any family."""
  fields = _fields(pathlib.Path(path).expanduser())
  names = fields.get('architectures') or ['']
  return fields.get('model_type') in FAMILIES or 'ForCausalLM' in str(names[0])


def _fields(folder: pathlib.Path) -> dict[str, Any]:
  try:
    fields = json.loads((folder / 'config.json').read_text('utf-8'))
  except (OSError, ValueError, RecursionError):
    return {}
  return fields if isinstance(fields, dict) else {}


def derive(path: str | os.PathLike) -> LMConfig:
  """Returns the config of the dense model in a directory of Hugging Face.

  Raises:
    UserError: there is no `config.json`, or it asks for what is not here: an
      unknown architecture, or a setting that changes the function.
  """
  folder = pathlib.Path(path).expanduser()
  fields = _fields(folder)
  family = fields.get('model_type')
  where = f'{folder}/config.json'
  if family not in FAMILIES:
    raise UserError(
      f'{where}: model_type={family!r} is no architecture that is known here;'
      f' expected {", ".join(FAMILIES)}.'
    )
  for key, allowed in _MUST_BE.items():
    value = fields.get(key)
    if value is not None and value not in allowed:
      wanted = ' or '.join(map(repr, allowed[:1])) or 'no such key'
      raise UserError(
        f'{where}: {key}={value!r} changes what the model computes, and is not'
        f' supported; expected {wanted}.'
      )
  try:
    theta, scaling = _rope(fields, where)
    width, heads = fields['hidden_size'], fields['num_attention_heads']
    return LMConfig(
      vocab_size=fields['vocab_size'],
      num_layers=fields['num_hidden_layers'],
      width=width,
      num_heads=heads,
      num_kv_heads=fields.get('num_key_value_heads') or heads,
      head_dim=fields.get('head_dim') or width // heads,
      mlp='swiglu',
      mlp_dim=fields['intermediate_size'],
      tied_head=bool(fields.get('tie_word_embeddings', False)),
      rope_theta=float(theta),
      rope_scaling=scaling,
      window=_window(fields, where),
      qkv_bias=family == 'qwen2',
      qk_norm=family == 'qwen3',
      norm_epsilon=fields.get('rms_norm_eps', 1e-6),
      routing=None,
    )
  except KeyError as error:
    raise UserError(
      f'{where} has no {error}: it may be cut short, so fetch it again.'
    ) from error


def _rope(fields, where) -> tuple[float, RopeScaling | None]:
  """Returns base and scaling, from the old keys or the new one."""
  told = fields.get('rope_parameters') or fields.get('rope_scaling') or {}
  if not isinstance(told, dict):
    raise UserError(
      f'{where}: the scaling of rotary positions is {told!r}; expected an'
      ' object, such as {"rope_type": "linear", "factor": 2}.'
    )
  theta = told.get('rope_theta', fields.get('rope_theta', 10_000.0))
  kind = told.get('rope_type', told.get('type', 'default'))
  if kind not in _SCALINGS:
    raise UserError(
      f'{where}: rope_type={kind!r} changes what the model computes, and is not'
      f' supported; expected {", ".join(_SCALINGS)}.'
    )
  if kind == 'default':
    return theta, None
  if kind == 'linear':
    return theta, RopeScaling(kind='linear', factor=told['factor'])
  return theta, RopeScaling(
    factor=told['factor'],
    low_frequency=told['low_freq_factor'],
    high_frequency=told['high_freq_factor'],
    original_length=told['original_max_position_embeddings'],
  )


def _window(fields, where) -> int | None:
  """Returns the sliding window, which all layers have or none."""
  window, count = fields.get('sliding_window'), fields['num_hidden_layers']
  if window is None or not fields.get(
    'use_sliding_window', fields['model_type'] == 'mistral'
  ):
    return None
  kinds = fields.get('layer_types')
  if kinds is None:
    first = 0
    if fields['model_type'] != 'mistral':
      first = fields.get('max_window_layers', 0)
    kinds = ['full_attention'] * min(first, count)
    kinds += ['sliding_attention'] * (count - len(kinds))
  if len(set(kinds)) > 1:
    raise UserError(
      f'{where}: some layers have a sliding window and some have none, which is'
      ' not supported; expected the same for all.'
    )
  return window if kinds[0] == 'sliding_attention' else None


def names(config: LMConfig) -> tuple[Entry, ...]:
  """Returns which of their arrays is which of ours, layers not scanned."""
  entries = [Entry('model.embed_tokens.weight', ('embedding',), 'same')]

  def add(theirs, ours, layout, kind='kernel'):
    theirs += '.bias' if kind == 'bias' else '.weight'
    entries.append(Entry(theirs, (f'{ours}/{kind}',), layout))

  for i in range(config.num_layers):
    theirs, ours = f'model.layers.{i}', f'block_{i}'
    for name, short in (('query', 'q'), ('key', 'k'), ('value', 'v')):
      projection = f'{theirs}.self_attn.{short}_proj'
      add(projection, f'{ours}/attention/{name}', 'inward')
      if config.qkv_bias:
        add(projection, f'{ours}/attention/{name}', 'vector', 'bias')
      if config.qk_norm and name != 'value':
        norm = f'{theirs}.self_attn.{short}_norm'
        add(norm, f'{ours}/attention/{name}_norm', 'vector', 'scale')
    add(f'{theirs}.self_attn.o_proj', f'{ours}/attention/out', 'outward')
    for name in ('gate', 'up', 'down'):
      add(f'{theirs}.mlp.{name}_proj', f'{ours}/mlp/{name}', 'inward')
    for norm, mine in (
      ('input_layernorm', 'attention_norm'),
      ('post_attention_layernorm', 'mlp_norm'),
    ):
      add(f'{theirs}.{norm}', f'{ours}/{mine}', 'vector', 'scale')
  add('model.norm', 'norm', 'vector', 'scale')
  if not config.tied_head:
    add('lm_head', 'head', 'inward')
  return tuple(entries)


def _check_ours(config: LMConfig) -> None:
  if config.mlp != 'swiglu' or config.feed_forward is not None:
    raise UserError(
      f'mlp={config.mlp!r}: the models of Hugging Face that are known here'
      " have mlp='swiglu'."
    )
  if config.qkv_bias and config.qk_norm:
    raise UserError(
      'qkv_bias and qk_norm: no architecture that is known here has both, so'
      ' the model cannot be written for Hugging Face.'
    )


@functools.lru_cache(maxsize=4)
def _shapes(config: LMConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of our dense parameters, layers not scanned."""
  config = dataclasses.replace(config.dense_twin(), scan_layers=False)
  boxed = jax.eval_shape(
    config.build().init, jax.random.key(0), config.example()
  )
  flat = trees.flatten(nn.unbox(boxed)['params'])
  return {name: leaf.shape for name, leaf in flat.items()}


def read(path: str | os.PathLike, config: LMConfig) -> dict[str, Lazy]:
  """Returns the dense parameters of a model by name; each is read when needed.

  Args:
    path: directory of a model of Hugging Face.
    config: of ours; routing changes nothing, and scanned layers are stacked.

  Raises:
    UserError: files are missing, or they hold another model: tells every array
      that is missing, unexpected or of another shape.
  """
  _check_ours(config)
  stored = files.stored(path)
  entries, shapes = names(config), _shapes(config)
  dropped = [_USELESS]
  if config.tied_head and 'lm_head.weight' in stored:
    embedding = stored['model.embed_tokens.weight']
    if np.array_equal(stored['lm_head.weight'].read(), embedding.read()):
      dropped.append(r'lm_head\.weight')
  trees.compare(
    {entry.theirs: entry.shape(shapes) for entry in entries},
    {name: array.shape for name, array in stored.items()},
    dropped=dropped,
    describe=f'{path}, a language model,',
  )

  def lazy(entry):
    shape = shapes[entry.ours[0]]

    def array():
      return entry.to_ours(stored[entry.theirs].read(), shape)[0]

    return Lazy(shape, array)

  found = {entry.ours[0]: lazy(entry) for entry in entries}
  return _scanned(config, found) if config.scan_layers else found


def _scanned(config: LMConfig, found: Mapping[str, Lazy]) -> dict[str, Lazy]:
  """Returns lazy parameters by the names of scanned layers."""
  period = config.stack.period
  groups, rest = {}, {}
  for name, array in found.items():
    block = re.match(r'block_(\d+)/(.*)', name)
    if block is None:
      rest[name] = array
      continue
    group, j = divmod(int(block[1]), period)
    groups.setdefault(f'layers/block_{j}/{block[2]}', {})[group] = array

  def stacked(parts):
    arrays = [parts[i] for i in range(len(parts))]
    shape = (len(arrays), *arrays[0].shape)
    return Lazy(shape, lambda: np.stack([np.asarray(x) for x in arrays]))

  return rest | {name: stacked(parts) for name, parts in groups.items()}


def load(path: str | os.PathLike, config: LMConfig) -> dict[str, Any]:
  """Returns the parameters of a dense model; arguments are those of `read`."""
  flat = read(path, config)
  return trees.unflatten(
    {n: jnp.asarray(np.asarray(x)) for n, x in flat.items()}
  )


def save(
  folder: str | os.PathLike,
  params,
  config: LMConfig,
  *,
  like: str | os.PathLike | None = None,
  length: int = 2048,
  tokenizer: Tokenizer | None = None,
) -> None:
  """Writes the dense part of a model as Hugging Face has it.

  Args:
    folder: directory, which is made; files in it are replaced.
    params: nested dictionary of arrays; routers are left out.
    config: of the model.
    like: directory of the model that this one was made from, whose
      `config.json`, types of arrays and tokenizer are taken over; None for a
      `config.json` of our own, and float32.
    length: tokens that it was trained to read, for a `config.json` of our own.
    tokenizer: whose first and last token stand there.

  Raises:
    UserError: no known architecture computes what the model does; or the
      parameters are not those of the config.
  """
  dense = config.dense_twin()
  _check_ours(dense)
  folder = pathlib.Path(folder).expanduser()
  like = None if like is None else pathlib.Path(like).expanduser()
  types = {}
  fields = _config_json(dense, length) | {
    f'{name}_token_id': getattr(tokenizer, f'{name}_id', None)
    for name in ('bos', 'eos')
  }
  if like is not None and derive(like) == _comparable(dense):
    fields = _fields(like)
    types = {name: x.dtype for name, x in files.stored(like).items()}
    for name in BESIDE:
      if (like / name).is_file():
        paths.write_bytes(folder / name, (like / name).read_bytes())
  _, unrolled = lm.unrolled(config, params)
  flat = trees.flatten(nn.unbox(unrolled))
  entries, shapes = names(dense), _shapes(dense)
  trees.compare(
    shapes,
    {name: array.shape for name, array in flat.items()},
    dropped=(r'(block_\d+/)?(router|predictor)/.*',),
    describe='params',
  )

  def array(entry):
    found = entry.to_theirs(np.asarray(flat[entry.ours[0]], np.float32))
    return np.asarray(found, _DTYPES[types.get(entry.theirs, 'F32')])

  sizes = {
    entry.theirs: np.dtype(_DTYPES[types.get(entry.theirs, 'F32')]).itemsize
    * int(np.prod(shapes[entry.ours[0]]))
    for entry in entries
  }
  _write(folder, entries, array, sizes)
  text = json.dumps(fields, indent=2, ensure_ascii=False) + '\n'
  paths.write_bytes(folder / 'config.json', text.encode())


def _comparable(dense: LMConfig) -> LMConfig:
  """Returns what a `config.json` can say of a model."""
  block = dense.block
  return LMConfig(
    vocab_size=dense.vocab_size,
    num_layers=dense.num_layers,
    width=dense.width,
    num_heads=dense.num_heads,
    num_kv_heads=block.attention.num_kv_heads,
    head_dim=block.attention.head_dim,
    mlp=dense.mlp,
    mlp_dim=block.mlp.hidden,
    tied_head=dense.tied_head,
    rope_theta=dense.rope_theta,
    rope_scaling=dense.rope_scaling,
    window=dense.window,
    qkv_bias=dense.qkv_bias,
    qk_norm=dense.qk_norm,
    norm_epsilon=dense.norm_epsilon,
    routing=None,
  )


def _write(folder, entries, array, sizes):
  """Writes one file, or several and their index."""
  shards = [[]]
  size = 0
  for entry in entries:
    if shards[-1] and size + sizes[entry.theirs] > _SHARD:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += sizes[entry.theirs]
  weight_map, written = {}, set()
  for i, shard in enumerate(shards):
    name = 'model.safetensors'
    if len(shards) > 1:
      name = f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors'
    arrays = {entry.theirs: array(entry) for entry in shard}
    files.write(folder / name, arrays)
    weight_map |= dict.fromkeys(arrays, name)
    written.add(name)
  if len(shards) > 1:
    index = {
      'metadata': {'total_size': sum(sizes.values())},
      'weight_map': weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + '\n'
    paths.write_bytes(folder / files.INDEX, text.encode())
    written.add(files.INDEX)
  files.remove_others(folder, written)


def _config_json(dense: LMConfig, length: int) -> dict[str, Any]:
  """Returns the fields of a `config.json`, of the family that has them."""
  config = _comparable(dense)
  family, model = 'llama', 'LlamaForCausalLM'
  if config.qk_norm:
    family, model = 'qwen3', 'Qwen3ForCausalLM'
  elif config.qkv_bias:
    family, model = 'qwen2', 'Qwen2ForCausalLM'
  elif config.window is not None:
    family, model = 'mistral', 'MistralForCausalLM'
  fields = {
    'architectures': [model],
    'model_type': family,
    'vocab_size': config.vocab_size,
    'hidden_size': config.width,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'intermediate_size': config.mlp_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_epsilon,
    'rope_theta': config.rope_theta,
    'tie_word_embeddings': config.tied_head,
    'max_position_embeddings': length,
    'torch_dtype': 'float32',
  }
  if family == 'qwen2' and config.head_dim * config.num_heads != config.width:
    raise UserError(
      f'head_dim={config.head_dim}: in a Qwen2, the only architecture known'
      ' here with qkv_bias, it is width / num_heads.'
    )
  if config.window is not None:
    fields['sliding_window'] = config.window
    if family != 'mistral':
      fields |= {'use_sliding_window': True, 'max_window_layers': 0}
  if (scaling := config.rope_scaling) is not None:
    fields['rope_scaling'] = {
      'rope_type': scaling.kind,
      'factor': scaling.factor,
    }
    if scaling.kind == 'llama3':
      fields['rope_scaling'] |= {
        'low_freq_factor': scaling.low_frequency,
        'high_freq_factor': scaling.high_frequency,
        'original_max_position_embeddings': scaling.original_length,
      }
  return fields


def max_length(path: str | os.PathLike) -> int:
  """Returns how many tokens a model of Hugging Face was made to read."""
  length = _fields(pathlib.Path(path).expanduser()).get(
    'max_position_embeddings'
  )
  if length is None:
    logging.warning('%s does not tell its length: assumed 2048 tokens.', path)
  return length or 2048
