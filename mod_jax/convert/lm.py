"""Language models of Hugging Face: Llama, Mistral, Qwen2 and Qwen3.

Reads and writes directories in the format of `transformers`: `config.json`, the
weights in one or several safetensors files, and the tokenizer's files. `derive`
reads the config, `read` reads the weights, and `save` writes both. The order of
rotary channels (two halves) is the same as ours, so nothing is permuted.
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
import pathlib
import re
from typing import Any, Literal

from flax import linen as nn
import numpy as np

from mod_jax import config as config_lib
from mod_jax import trees
from mod_jax.convert import arrays as arrays_lib
from mod_jax.convert import files
from mod_jax.convert.arrays import Entry
from mod_jax.convert.files import Lazy
from mod_jax.data import tokenizers
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.errors import UserError
from mod_jax.layers.rope import RopeScaling
from mod_jax.models import lm
from mod_jax.models.lm import LMConfig

# Maps fields of an `LMConfig` to fields of a `config.json` of the same meaning.
_FIELDS = {
  'vocab_size': 'vocab_size',
  'num_layers': 'num_hidden_layers',
  'width': 'hidden_size',
  'num_heads': 'num_attention_heads',
  'tied_head': 'tie_word_embeddings',
  'norm_epsilon': 'rms_norm_eps',
}
# Maps fields of a `RopeScaling` to those of a `config.json`, by its kind.
_ROPE = {
  'linear': {'factor': 'factor'},
  'llama3': {
    'factor': 'factor',
    'low_frequency': 'low_freq_factor',
    'high_frequency': 'high_freq_factor',
    'original_length': 'original_max_position_embeddings',
  },
}
# Maps our names of modules and arrays to Hugging Face's, for `arrays.entries`.
_TABLE = {
  'embedding': 'model.embed_tokens.weight',
  'block_{}/attention_norm': 'model.layers.{}.input_layernorm.',
  'block_{}/attention/query': 'model.layers.{}.self_attn.q_proj.',
  'block_{}/attention/query_norm': 'model.layers.{}.self_attn.q_norm.',
  'block_{}/attention/key': 'model.layers.{}.self_attn.k_proj.',
  'block_{}/attention/key_norm': 'model.layers.{}.self_attn.k_norm.',
  'block_{}/attention/value': 'model.layers.{}.self_attn.v_proj.',
  'block_{}/attention/out': 'model.layers.{}.self_attn.o_proj.',
  'block_{}/mlp_norm': 'model.layers.{}.post_attention_layernorm.',
  'block_{}/mlp/gate': 'model.layers.{}.mlp.gate_proj.',
  'block_{}/mlp/up': 'model.layers.{}.mlp.up_proj.',
  'block_{}/mlp/down': 'model.layers.{}.mlp.down_proj.',
  'norm': 'model.norm.',
  'head': 'lm_head.',
}
# Arrays to ignore: constants in old files.
_USELESS = r'.*\.rotary_emb\.inv_freq'
# Files that `save` copies: the tokenizer's, and the generation settings.
BESIDE = (
  *('tokenizer.json', 'tokenizer.model', 'tokenizer_config.json'),
  *('special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt'),
  *('chat_template.jinja', 'chat_template.json', 'generation_config.json'),
)


# Settings of a `generation_config.json` that change even greedy decoding, with
# the values that have no effect.
_GENERATION = {
  **{'repetition_penalty': 1, 'no_repeat_ngram_size': 0, 'num_beams': 1},
  **{'min_length': 0, 'min_new_tokens': 0},
  **dict.fromkeys(('suppress_tokens', 'begin_suppress_tokens')),
  **dict.fromkeys(('forced_bos_token_id', 'forced_eos_token_id')),
  **dict.fromkeys(('bad_words_ids', 'sequence_bias', 'stop_strings')),
  **{'encoder_repetition_penalty': 1, 'encoder_no_repeat_ngram_size': 0},
  **{'exponential_decay_length_penalty': None, 'guidance_scale': 1},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fixed:
  """Fields that change what the model computes, with the supported values."""

  hidden_act: Literal['silu'] | None = None
  is_causal: Literal[True] | None = None
  attention_bias: Literal[False] | None = None
  mlp_bias: Literal[False] | None = None
  partial_rotary_factor: Literal[1, 1.0] | None = None
  logit_scale: Literal[1, 1.0] | None = None
  embedding_multiplier: Literal[1, 1.0] | None = None
  residual_multiplier: Literal[1, 1.0] | None = None
  attention_multiplier: None = None
  attn_logit_softcapping: None = None
  final_logit_softcapping: None = None
  quantization_config: None = None
  num_local_experts: None = None
  num_experts: None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rope:
  """Fields of `rope_scaling` or, in newer files, of `rope_parameters`."""

  rope_type: Literal['default', 'linear', 'llama3'] = 'default'
  rope_theta: float = 10_000.0
  factor: float | None = None
  low_freq_factor: float | None = None
  high_freq_factor: float | None = None
  original_max_position_embeddings: config_lib.Size | None = None
  partial_rotary_factor: Literal[1, 1.0] | None = None

  @property
  def scaling(self) -> RopeScaling | None:
    if self.rope_type == 'default':
      return None
    names = _ROPE[self.rope_type].items()
    values = {ours: getattr(self, theirs) for ours, theirs in names}
    return RopeScaling(kind=self.rope_type, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
  """The fields of a `config.json` that are read, except `_Rope` and `_Fixed`.

  `_DEFAULTS` has other defaults, by family, where transformers has them.
  """

  vocab_size: config_lib.Size
  hidden_size: config_lib.Width
  intermediate_size: config_lib.Size
  num_hidden_layers: config_lib.Unrolled
  num_attention_heads: config_lib.Size
  # None: num_attention_heads.
  num_key_value_heads: config_lib.Size | None = None
  # None: hidden_size / num_attention_heads.
  head_dim: config_lib.Size | None = None
  max_position_embeddings: config_lib.PositiveCount = 2048
  rms_norm_eps: config_lib.Epsilon = 1e-6
  tie_word_embeddings: bool = False
  sliding_window: config_lib.Size | None = None
  use_sliding_window: bool = True
  max_window_layers: config_lib.Count = 0  # First layer with a window.
  layer_types: (
    tuple[Literal['full_attention', 'sliding_attention'], ...] | None
  ) = None

  @property
  def windows(self) -> set[int | None]:
    """The set of all layers' sliding windows, in tokens; None is no window."""
    if not self.use_sliding_window:
      return {None}
    slides = [
      i >= self.max_window_layers for i in range(self.num_hidden_layers)
    ]
    if self.layer_types:
      slides = [kind == 'sliding_attention' for kind in self.layer_types]
    return {self.sliding_window if slide else None for slide in slides}


_QWEN = {
  'num_key_value_heads': 32,
  'max_position_embeddings': 32768,
  'sliding_window': 4096,
  'use_sliding_window': False,
  'max_window_layers': 28,
  'layer_types': None,
}
# The families, by `model_type`, and their own defaults of fields. What else
# distinguishes a family is in `from_fields` and, for writing, `fields_of`.
_DEFAULTS = {
  'llama': {},
  'mistral': {
    'num_key_value_heads': 8,
    'max_position_embeddings': 32 * 4096,
    'sliding_window': 4096,
  },
  'qwen2': _QWEN,
  'qwen3': _QWEN | {'head_dim': 128},
}
FAMILIES = tuple(_DEFAULTS)
# Fields that are ignored in families without a default for them.
_WINDOW = {
  *('sliding_window', 'use_sliding_window', 'max_window_layers'),
  'layer_types',
}


def _read_config(
  fields: Mapping[str, Any], where: str
) -> tuple[_Fields, _Rope]:
  """Returns the fields of a `config.json` that this module reads.

  The rotary settings are apart, since files nest them differently. `where`
  names the file in messages. Raises UserError for an unknown architecture and
  for settings that are not supported.
  """
  family = fields.get('model_type')
  if family not in FAMILIES:
    raise UserError(
      f'{where}: model_type={family!r} is no architecture that is known here;'
      f' expected {", ".join(FAMILIES)}.'
    )
  config_lib.from_known(
    _Fixed, fields, f'{where} has a setting that is not supported'
  )
  rope = fields.get('rope_scaling') or fields.get('rope_parameters') or {}
  if not isinstance(rope, dict):
    raise UserError(
      f'{where}: the scaling of rotary positions is {rope!r}; expected an'
      ' object, such as {"rope_type": "linear", "factor": 2}.'
    )
  # Older files have these names; values with newer names take precedence.
  old = {'rope_theta': fields.get('rope_theta'), 'rope_type': rope.get('type')}
  rope = {name: x for name, x in old.items() if x is not None} | rope
  defaults = _DEFAULTS[family]
  unread = _WINDOW - defaults.keys()
  fields = defaults | {k: x for k, x in fields.items() if k not in unread}
  return (
    config_lib.from_known(_Fields, fields, where),
    config_lib.from_known(_Rope, rope, f'{where}: rope_parameters'),
  )


def derive(path: str | os.PathLike) -> LMConfig:
  """Returns the config of the dense model in a directory of Hugging Face.

  Raises:
    UserError: there is no `config.json`, or its architecture or a setting is
      not supported.
  """
  return from_fields(files.config_json(path), f'{path}/config.json')


def from_fields(fields: Mapping[str, Any], where: str) -> LMConfig:
  """Like `derive`, from the fields of a `config.json` that is named `where`."""
  saved, rope = _read_config(fields, where)
  if len(saved.windows) > 1:
    raise UserError(
      f'{where}: some layers have a sliding window and some have none, which is'
      ' not supported; expected the same for all.'
    )
  with config_lib.inside(where):
    return LMConfig(
      **{ours: getattr(saved, theirs) for ours, theirs in _FIELDS.items()},
      num_kv_heads=saved.num_key_value_heads or saved.num_attention_heads,
      head_dim=saved.head_dim or saved.hidden_size // saved.num_attention_heads,
      mlp='swiglu',
      mlp_dim=saved.intermediate_size,
      rope_theta=rope.rope_theta,
      rope_scaling=rope.scaling,
      window=next(iter(saved.windows)),
      qkv_bias=fields['model_type'] == 'qwen2',
      qk_norm=fields['model_type'] == 'qwen3',
      routing=None,
    )


def names(config: LMConfig) -> tuple[Entry, ...]:
  """Returns the table that maps Hugging Face's arrays to the dense model's.

  Its layers are not scanned.
  """
  dense = dataclasses.replace(config.dense_twin(), scan_layers=False)
  return arrays_lib.entries(arrays_lib.shapes_of(dense), _TABLE, 'Hugging Face')


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


def read(
  path: str | os.PathLike,
  config: LMConfig,
  stored: Mapping[str, Lazy] | None = None,
) -> dict[str, Lazy]:
  """Returns the dense parameters of a model by name, read lazily.

  Parameters of scanned layers are stacked. `stored` are Hugging Face's arrays
  by name; None means the arrays in the safetensors at `path`.

  Raises:
    UserError: files are missing, or they hold another model: the message lists
      all arrays that are missing, unexpected or of another shape.
  """
  _check_ours(config)
  stored = files.stored(path) if stored is None else stored
  dropped = [_USELESS]
  head, embedding = 'lm_head.weight', 'model.embed_tokens.weight'
  if config.tied_head and head in stored:
    # Some programs store an array with two names by the first of them alone.
    stored = {embedding: stored[head]} | stored
    if np.array_equal(stored[head], stored[embedding]):
      dropped.append(re.escape(head))
  params = arrays_lib.read(
    *(names(config), stored),
    dropped=dropped,
    describe=f'{path}, a language model,',
  )
  return _scanned(config, params) if config.scan_layers else params


def _scanned(config: LMConfig, params: Mapping[str, Lazy]) -> dict[str, Lazy]:
  """Stacks the parameters of unscanned layers for scanned layers."""

  def stacked(arrays):
    shape = (len(arrays), *arrays[0].shape)
    return Lazy(shape, lambda: np.stack([np.asarray(x) for x in arrays]))

  period, scanned = config.stack.period, {}
  for name, array in params.items():
    block = re.match(r'block_(\d+)/(.*)', name)
    if block is None:
      scanned[name] = array
    elif int(block[1]) < period:
      numbers = range(int(block[1]), config.num_layers, period)
      scanned[f'layers/{name}'] = stacked(
        [params[f'block_{i}/{block[2]}'] for i in numbers]
      )
  return scanned


def save(
  folder: str | os.PathLike,
  params,
  config: LMConfig,
  *,
  like: str | os.PathLike | None = None,
  length: int = 2048,
  tokenizer: Tokenizer | None = None,
) -> None:
  """Writes a model, without its routers, in the format of Hugging Face.

  Args:
    folder: directory, created if missing; files in it are replaced.
    params: nested dictionary of arrays.
    config: config of the model.
    like: directory of the model that this one was made from. If its
      architecture and sizes are the same, its `config.json`, types of arrays,
      tokenizer and generation settings are used. Otherwise, or with None,
      writes a new `config.json` and float32 arrays.
    length: longest input in training, in tokens, for a new `config.json`.
    tokenizer: tokenizer whose begin and end ids are written to a new
      `config.json`; None writes null.

  Raises:
    UserError: no supported architecture computes the same function, or the
      parameters are not those of the config.
  """
  dense = config.dense_twin()
  folder = pathlib.Path(folder).expanduser()
  types = {}
  fields = fields_of(dense, length, tokenizer)
  if like is not None and derive(like) == from_fields(fields, 'config.json'):
    like = pathlib.Path(like).expanduser()
    fields = files.config_json(like)
    if files.has_stored(like):
      types = {name: x.stored for name, x in files.stored(like).items()}
    copy_beside(like, folder, BESIDE)
  files.write_sharded(folder, arrays(params, config, types))
  files.write_json(folder / 'config.json', fields)


def copy_beside(like: pathlib.Path, folder: pathlib.Path, names) -> None:
  """Copies the named files of a model whose `config.json` is copied, too."""
  files.copy(like, folder, names)
  generation = 'generation_config.json'
  if not (like / generation).is_file():
    # Its settings are in `config.json`, from where transformers does not take
    # them beside a file with the tokenizer's end tokens.
    (folder / generation).unlink(missing_ok=True)


def arrays(
  params, config: LMConfig, types: Mapping[str, str]
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
  """Returns a model's dense parameters as `files.write_sharded` takes them.

  `types` and errors are those of `convert.arrays.arrays`.
  """
  _, unrolled = lm.unrolled(config, params)
  flat = trees.flatten(nn.unbox(unrolled))
  dropped = (r'(block_\d+/)?(router|predictor)/.*',)
  return arrays_lib.arrays(names(config), flat, types, dropped)


def fields_of(
  dense: LMConfig, length: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
  """Returns the fields of a `config.json` of the first family that fits.

  Arguments are those of `save`.

  Raises:
    UserError: no supported architecture computes the same function.
  """
  _check_ours(dense)
  family = 'llama'
  if dense.qk_norm:
    family = 'qwen3'
  elif dense.qkv_bias:
    family = 'qwen2'
  elif dense.window is not None:
    family = 'mistral'
  fields = {
    'architectures': [f'{family.capitalize()}ForCausalLM'],
    'model_type': family,
    **{theirs: getattr(dense, ours) for ours, theirs in _FIELDS.items()},
    'num_key_value_heads': dense.block.attention.num_kv_heads,
    'head_dim': dense.block.attention.head_dim,
    'intermediate_size': dense.block.mlp.hidden,
    'hidden_act': 'silu',
    'rope_theta': dense.rope_theta,
    'max_position_embeddings': length,
    'torch_dtype': 'float32',
    'bos_token_id': getattr(tokenizer, 'bos_id', None),
    'eos_token_id': getattr(tokenizer, 'eos_id', None),
  }
  if dense.window is not None:
    fields['sliding_window'] = dense.window
    if family != 'mistral':
      fields |= {'use_sliding_window': True, 'max_window_layers': 0}
  if (scaling := dense.rope_scaling) is not None:
    names = _ROPE[scaling.kind].items()
    values = {theirs: getattr(scaling, ours) for ours, theirs in names}
    fields['rope_scaling'] = {'rope_type': scaling.kind} | values
  return fields


def max_length(path: str | os.PathLike) -> int:
  """Returns the longest input in tokens, as a folder's `config.json` has it."""
  return length_of(files.config_json(path), f'{path}/config.json')


def unfollowed(path: str | os.PathLike) -> list[str]:
  """Returns a model's unsupported generation settings, as 'name=value'."""
  told = tokenizers.generation_settings(path)
  names = [k for k, x in _GENERATION.items() if told.get(k) not in (x, None)]
  return [f'{name}={told[name]}' for name in names]


def length_of(fields: Mapping[str, Any], where: str) -> int:
  """Like `max_length`, from the fields of a `config.json` named `where`."""
  saved, _ = _read_config(fields, where)
  return saved.max_position_embeddings
