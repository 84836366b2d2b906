"""Exports models as folders for mod_jax, Hugging Face transformers or timm."""

import dataclasses
import json
import math
import os
import pathlib
import re
import tempfile
from typing import Any, Literal

from absl import logging
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import paths, trees
from mod_jax.convert import beside, files
from mod_jax.convert import clip as convert_clip
from mod_jax.convert import detr as convert_detr
from mod_jax.convert import llava as convert_llava
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import peft as convert_peft
from mod_jax.convert import vit as convert_vit
from mod_jax.data import tokenizers
from mod_jax.errors import UserError
from mod_jax.models import lora
from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.pretrained.load import Run, require_floats
from mod_jax.pretrained.source import FOLDER, WEIGHTS
from mod_jax.runs import workdir

# File of a language model's routers, in formats that hold only dense weights.
ROUTERS = 'routers.safetensors'
_WEIGHTS = (WEIGHTS, files.INDEX, convert_peft.WEIGHTS)  # Folders have one.
# All files that exports write, and some that libraries write. Those of an
# earlier model are deleted, or they would be read as part of the new model.
_OF_MODELS = (
  *(*_WEIGHTS, files.SHARDS, FOLDER, ROUTERS, convert_peft.CONFIG),
  *('config.json', 'preprocessor_config.json', 'processor_config.json'),
  *convert_lm.BESIDE,
)
_ROUTERS = '(^|/)(router|predictor)/'  # Pattern in the names of routers.
# The only epsilon of timm's layer norms: its configs have no field for it.
_TIMM_EPSILON = 1e-6
Format = Literal['safetensors', 'huggingface', 'timm', 'peft']
# The library that reads each format.
_READERS = {'huggingface': 'transformers', 'timm': 'timm', 'peft': 'PEFT'}
# Fields of configs for features that other libraries lack, with their names.
_OURS = {
  'routing': 'routed blocks',
  'reduction': 'blocks that leave fewer tokens',
  'feed_forward': 'feed-forward slots of its own',
  'adaptive': 'learners',
  'experts': 'experts',
}


def export(
  run: Run,
  path: str | os.PathLike,
  format: Format = 'safetensors',
  *,
  dense: bool = False,
) -> None:
  """Writes a model to a folder: weights, config, tokenizer or preprocessing.

  * `safetensors` is mod_jax's own format. It holds any model, and is the only
    one for models of speech; `load` reads it.
  * `huggingface` is read by `transformers`, as a ViT or, with a distillation
    token, a DeiT for classification, as CLIPVisionModel, DETR or LLaVA, or as
    the equivalent language model of `convert.lm.FAMILIES`. Dense models only.
  * `timm` is read by `timm.create_model('local-dir:FOLDER')`. Dense ViTs and
    DeiTs only.
  * `peft` is read by PEFT, and by `load`: the adapters of a dense model,
    without the model that they belong to.

  All formats but `peft` merge adapters into the weights (`models.lora`).
  `safetensors` includes the config of the run, with absolute paths, such as the
  path of its data, reduced to their last part.

  Args:
    run: the model, as `load` returns it.
    path: the folder, created if necessary. If it contains a model, all files of
      that model are deleted. Other files stay.
    format: the format.
    dense: whether to export a routed or pruned model as the dense model with
      the same weights (with `peft`, its adapters), although that computes
      something else. Impossible for learners and experts, which have no dense
      weights. Routers of a language model, and with `peft` of any model, are
      written to `routers.safetensors`.

  Raises:
    UserError: the format cannot represent the model; or the folder cannot be
      written, or holds a run or the model that the adapters belong to.
  """
  writers = {
    'safetensors': _ours,
    'huggingface': _huggingface,
    'timm': _timm,
    'peft': _peft,
  }
  write = config_lib.choose(format, writers, 'format')
  require_floats(run)
  if write is not _ours:
    _check_dense(run, format, dense)
  elif dense and run.config.with_parts(lora=None) != run.config.dense_twin():
    raise UserError(
      "dense=True (--export_dense): the format 'safetensors' holds this model"
      ' as it is: leave it out, or export for another library.'
    )
  paths.require_local(os.fspath(path), 'path')
  folder = pathlib.Path(path).expanduser()
  if workdir.holds_run(folder) or workdir.checkpoints(folder).exists():
    raise UserError(
      f'{folder} is the directory of a run, of which an export would replace'
      ' config.json: name another folder.'
    )
  base = run.base and pathlib.Path(run.base).expanduser()
  if base and base.resolve() == folder.resolve():
    raise UserError(
      f'{folder} holds the weights that the adapters of this model belong to,'
      ' which an export would replace: name another folder.'
    )
  if write is not _peft:
    run = _merged(run)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    # Files can be renamed from here: it is on the file system of `folder`.
    with tempfile.TemporaryDirectory(prefix='.new_', dir=folder) as name:
      new = pathlib.Path(name)
      write(run, new)
      if any((folder / name).exists() for name in _WEIGHTS):
        for pattern in _OF_MODELS:
          for old in folder.glob(pattern):
            old.unlink()
      for file in new.iterdir():
        file.replace(folder / file.name)
  except OSError as error:
    raise UserError(
      f'{folder} cannot be written ({error.strerror}): name a folder that can.'
    ) from error


def _merged(run):
  """Returns the model with its adapters, if any, merged into its weights."""
  if run.config.lora is None:
    return run
  variables = dict(run.variables)
  config, variables['params'] = lora.merge(run.config, variables['params'])
  experiment = run.experiment or (run.task and run.task.config)
  if experiment is not None:
    experiment = dataclasses.replace(experiment, model=config)
  return dataclasses.replace(
    run, config=config, variables=variables, experiment=experiment
  )


def _check_dense(run, format, dense):
  config = run.config
  if isinstance(config, Wav2Vec2Config):
    raise UserError(
      f"format={format!r} holds no model of speech: use 'safetensors'."
    )
  others = {'timm': LMConfig | DETRConfig | VLMConfig, 'peft': VLMConfig}
  if isinstance(config, others.get(format, ())):
    raise UserError(
      f"format={format!r} holds no such model: use 'huggingface' or"
      f" 'safetensors' for {config.noun}."
    )

  models = [config]
  for name in ('language', 'tower', 'backbone'):
    models += [getattr(x, name) for x in models if hasattr(x, name)]
  parts = [
    text
    for name, text in _OURS.items()
    if any(getattr(x, name, None) for x in models)
  ]
  if any(isinstance(x, DynamicViTConfig) for x in models):
    parts.append('the dropping of patches')
  has_dense = config.adaptive is None and config.experts is None
  if parts and not (dense and has_dense):
    way_out = (
      ', or with dense=True (--export_dense): the same weights, every block'
      ' dense, other outputs'
    )
    raise UserError(
      f'{_READERS[format]} cannot run {" or ".join(parts)}. Export as'
      f" 'safetensors' (for mod_jax){way_out * has_dense}."
    )


# Writers of the formats; `folder` is empty.


def _ours(run, folder):
  files.write(folder / WEIGHTS, trees.by_path(dict(run.variables)))
  experiment = run.experiment
  if experiment is None and run.task is not None:
    experiment = run.task.config
  if isinstance(run.config, Wav2Vec2Config):
    # The vocabulary is written beside the weights, and read from there alone.
    experiment = config_lib.replace(experiment, {'data.vocabulary': ''})
    for name, text in run.task.modality.files().items():
      paths.write_bytes(folder / name, text.encode())
  fields: dict[str, Any] = {
    'model': _config(run.config),
    'experiment': experiment and _local(_config(experiment)),
    'preprocess': run.preprocess and dataclasses.asdict(run.preprocess),
    'classes': run.classes and list(run.classes),
    'foreign': run.foreign,
    'multi_label': run.multi_label,
  }
  if isinstance(run.config, LMConfig | VLMConfig):
    fields['tokenizer'] = _tokenizer(run, folder)
  files.write_json(folder / FOLDER, fields)


def _tokenizer(run, folder) -> str | None:
  """Copies the tokenizer to `folder`; returns its kind, or None without one."""
  if run.task is None:
    return None
  kind, source = run.task.modality.tokenizer_source
  tokenizers.copy(kind, source, os.fspath(folder))
  return kind


def _peft(run, folder):
  if run.config.lora is None:
    raise UserError(
      "format='peft' holds adapters, and this model has none: export it as"
      " 'huggingface' or 'safetensors'."
    )
  if run.base is None:
    raise UserError(
      "format='peft' leaves out the model that the adapters belong to, and this"
      ' one was trained as a whole: set train.frozen in its run, or export it'
      " as 'huggingface' or 'safetensors'."
    )
  params, experiment = run.variables['params'], run.experiment
  if experiment is not None and experiment.train.frozen is not None:
    held = [lora.PARAMETERS, f'.*({_ROUTERS}).*']
    if not isinstance(run.config, LMConfig):
      held.append('head.*')
    for name in trees.flatten(experiment.split(params)[0]):
      if not any(re.fullmatch(pattern, name) for pattern in held):
        raise UserError(
          f"format='peft' holds adapters and the heads of classes, and {name}"
          " was trained as well: export the model as 'huggingface' or"
          " 'safetensors'."
        )
  convert_peft.save(folder, params, run.config, run.base)
  _write_routers(params, folder)


def _config(instance) -> dict[str, Any]:
  fields = json.loads(config_lib.to_json(instance))
  return {'type': type(instance).__name__} | fields


def _local(value):
  """Returns a JSON value, with only the last part of absolute paths in it."""
  if isinstance(value, dict):
    return {name: _local(x) for name, x in value.items()}
  if isinstance(value, list):
    return list(map(_local, value))
  if isinstance(value, str):
    # The string may be globs, separated by commas, with alternatives in braces.
    return re.sub(r'(^|[,{] *)[/~][^,{}]*/(?=[^/,{}])', r'\1', value)
  return value


def _dense_weights(run, folder, naming):
  variables = dict(run.variables)
  convert_vit.save(
    folder / WEIGHTS,
    variables['params'],
    run.config.dense_twin(),
    naming=naming,
    batch_stats=variables.get('batch_stats'),
  )


def _names(run) -> list[str]:
  count = run.config.dense_twin().num_classes
  return list(run.classes or (f'LABEL_{i}' for i in range(count)))


def _language(run, folder):
  params = run.variables['params']
  _tokenizer(run, folder)
  # The directory that the model was loaded from, if it still exists.
  there = run.origin is not None and os.path.isdir(run.origin)
  like = run.origin if there else None
  texts = {'like': like, 'tokenizer': run.tokenizer}
  if run.experiment is not None:  # It is None for LLaVA without a tokenizer.
    texts['length'] = run.experiment.data.length
  if isinstance(run.config, LMConfig):
    convert_lm.save(folder, params, run.config, **texts)
  else:
    _processor(run.preprocess, folder, 'CLIPImageProcessor')
    convert_llava.save(folder, params, run.config, **texts)
  _write_routers(params, folder)
  _declare(run, folder)


def _declare(run, folder) -> None:
  """Writes the name of a class by which transformers takes the tokenizer as is.

  Does nothing if a class is named already. Without a name, transformers takes
  the class of the model's architecture, which splits texts by its own rules.
  """
  tokenizer, file = run.tokenizer, folder / 'tokenizer_config.json'
  told = paths.read_object(file)
  of_bytes = isinstance(tokenizer, tokenizers.ByteTokenizer)
  if tokenizer is None or of_bytes or 'tokenizer_class' in told:
    return
  if getattr(run.config, 'qkv_bias', False):
    logging.warning(
      'AutoTokenizer of transformers 5 reads any tokenizer beside a model with'
      " qkv_bias as Qwen2's: load it by PreTrainedTokenizerFast instead."
    )
  own = {'tokenizer_class': 'PreTrainedTokenizerFast'}
  own['clean_up_tokenization_spaces'] = False
  for role, id in (('bos', tokenizer.bos_id), ('eos', tokenizer.eos_id)):
    if id is not None:
      own[f'{role}_token'] = tokenizer.spelled(id)
  files.write_json(file, own | told)


def _write_routers(params, folder) -> None:
  """Writes routers, if there are any, to a file of their own."""
  routers = {
    name: array
    for name, array in trees.flatten(params).items()
    if re.search(_ROUTERS, name)
  }
  if routers:
    files.write(folder / ROUTERS, routers)


def _huggingface(run, folder):
  if isinstance(run.config, LMConfig | VLMConfig):
    _language(run, folder)
  elif isinstance(run.config, DETRConfig):
    _detector(run, folder)
  elif run.config.dense_twin().input_norm:
    convert_clip.save(folder, run.variables['params'], run.config)
    _processor(run.preprocess, folder, 'CLIPImageProcessor')
  else:
    _vision(run, folder)


def _vision(run, folder):
  _dense_weights(run, folder, 'huggingface')
  dense, names = run.config.dense_twin(), _names(run)
  kind, model = 'vit', 'ViTForImageClassification'
  if dense.distilled:
    kind, model = 'deit', 'DeiTForImageClassification'
    if dense.distillation_head:
      model = 'DeiTForImageClassificationWithTeacher'
  files.write_json(
    folder / 'config.json',
    {
      'architectures': [model],
      'model_type': kind,
      'hidden_size': dense.width,
      'num_hidden_layers': dense.num_layers,
      'num_attention_heads': dense.num_heads,
      'intermediate_size': dense.mlp_dim or 4 * dense.width,
      'hidden_act': 'gelu',
      'hidden_dropout_prob': 0.0,
      'attention_probs_dropout_prob': 0.0,
      'layer_norm_eps': dense.norm_epsilon,
      'image_size': dense.image_size,
      'patch_size': dense.patch_size,
      'num_channels': 3,
      'qkv_bias': dense.qkv_bias,
      **_problem(run),
      'id2label': {str(i): name for i, name in enumerate(names)},
      'label2id': {name: i for i, name in enumerate(names)},
    },
  )
  # ViT's processor ignores the crop in some versions of transformers. In
  # version 4, DeiT's cannot resize the shorter side, and early ones of CLIP's
  # can resize nothing else.
  squashes = run.preprocess.resize == 'squash'
  processor = 'DeiTImageProcessor' if squashes else 'CLIPImageProcessor'
  _processor(run.preprocess, folder, processor)


def _processor(preprocess, folder, kind: str) -> None:
  side = round(preprocess.image_size / preprocess.crop_fraction)
  squashes = preprocess.resize == 'squash'
  _write_processor(
    *(preprocess, folder, kind),
    do_resize=preprocess.resize != 'none',
    size=_square(side) if squashes else {'shortest_edge': side},
    resample=int(preprocess.resample),
    do_center_crop=not squashes or side != preprocess.image_size,
    crop_size=_square(preprocess.image_size),
  )


def _write_processor(preprocess, folder, kind: str, **fields) -> None:
  fields = {'image_processor_type': kind} | fields
  fields |= {'do_rescale': True, 'rescale_factor': 1 / 255}
  fields |= {'do_normalize': True, 'image_mean': list(preprocess.mean)}
  fields |= {'image_std': list(preprocess.std)}
  files.write_json(folder / 'preprocessor_config.json', fields)


def _detector(run, folder):
  config = run.config.dense_twin()
  convert_detr.save(folder / WEIGHTS, run.variables, config)
  names, preprocess = _names(run), run.preprocess
  files.write_json(
    folder / 'config.json', convert_detr.their_config(config, names)
  )
  height, width = preprocess.image_size
  short, square = preprocess.short_side, height == width
  size = {'shortest_edge': short, 'longest_edge': height}
  if short is None or (not square and short >= min(height, width)):
    # `short_side` is None or has no effect: a picture that fits the height and
    # width has a shorter side of at most min(height, width) anyway.
    size = {'max_height': height, 'max_width': width}
  elif not square:
    raise UserError(
      f'short_side={short}, image_size={preprocess.image_size}: transformers'
      " has one limit for the longer side: use 'safetensors', or a square."
    )
  _write_processor(
    *(preprocess, folder, 'DetrImageProcessor'),
    do_resize=True,
    size=size,
    do_pad=True,
    resample=int(Image.Resampling.BILINEAR),
  )


def _problem(run) -> dict[str, str]:
  return {'problem_type': beside.MULTI_LABEL} if run.multi_label else {}


def _square(side: int) -> dict[str, int]:
  return {'height': side, 'width': side}


def _ratio(hidden: int, width: int) -> float:
  """Returns `mlp_ratio` for which timm's `int(width * ratio)` is `hidden`."""
  ratio = hidden / width
  return ratio if int(width * ratio) == hidden else math.nextafter(ratio, 99)


def _crop_pct(reads) -> float:
  """Returns `crop_pct` for which timm, rounding down, resizes as we do."""
  side = round(reads.image_size / reads.crop_fraction)
  fraction = reads.image_size / side
  exact = math.floor(reads.image_size / fraction) == side
  return fraction if exact else math.nextafter(fraction, 0)


def _timm(run, folder):
  dense, preprocess = run.config.dense_twin(), run.preprocess
  if dense.norm_epsilon != _TIMM_EPSILON:
    raise UserError(
      f"format='timm' has norm_epsilon={_TIMM_EPSILON:g} alone, and this model"
      f' {dense.norm_epsilon:g}, so it would compute something else there: use'
      " 'huggingface' or 'safetensors'."
    )
  if preprocess.resize == 'none':
    raise UserError(
      "format='timm' has no preprocessing that leaves the size of pictures as"
      " it is: use 'huggingface' or 'safetensors'."
    )
  _dense_weights(run, folder, 'timm')
  kind = 'vit_base_patch16_224'
  if dense.distilled:
    kind = 'deit_base_distilled_patch16_224'
  size = [3, dense.image_size, dense.image_size]
  files.write_json(
    folder / 'config.json',
    {
      # `model_args` override the sizes that the name implies.
      'architecture': kind,
      'num_classes': dense.num_classes,
      'num_features': dense.width,
      'model_args': {
        'img_size': dense.image_size,
        'patch_size': dense.patch_size,
        'embed_dim': dense.width,
        'depth': dense.num_layers,
        'num_heads': dense.num_heads,
        'mlp_ratio': _ratio(dense.mlp_dim or 4 * dense.width, dense.width),
        'qkv_bias': dense.qkv_bias,
      },
      'label_names': _names(run),
      **_problem(run),  # `load` reads this, timm does not.
      'pretrained_cfg': {
        'num_classes': dense.num_classes,
        'input_size': size,
        'fixed_input_size': True,
        'crop_pct': _crop_pct(preprocess),
        'crop_mode': 'squash' if preprocess.resize == 'squash' else 'center',
        'interpolation': preprocess.resample.name.lower(),
        'mean': list(preprocess.mean),
        'std': list(preprocess.std),
        'first_conv': 'patch_embed.proj',
        'classifier': ['head', 'head_dist'] if dense.distilled else 'head',
      },
    },
  )
