"""Whole folders of a model: for Hugging Face, for timm, and our own."""

import dataclasses
import json
import math
import os
import pathlib
import re
from typing import Any, Literal

import numpy as np

from mod_jax import config as config_lib
from mod_jax import paths, trees
from mod_jax.convert import files
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import vit as convert_vit
from mod_jax.data import tokenizers
from mod_jax.errors import UserError
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.serving.run import Run
from mod_jax.tasks.warm_start import FOLDER, WEIGHTS
from mod_jax.train import workdir

# What a routed language model has beside its dense part.
ROUTERS = 'routers.safetensors'
# Of the layer norms of timm's vision transformers, whose files name no other.
_TIMM_EPSILON = 1e-6
Format = Literal['safetensors', 'huggingface', 'timm']
# Who reads the formats of other libraries.
_READERS = {'huggingface': 'transformers', 'timm': 'timm'}
# What of a model no other library has, and how it is called.
_OURS = (
  ('routing', 'routed blocks'),
  ('feed_forward', 'feed-forward slots of its own'),
)
# What stands in the place of dense weights.
_REPLACED = (('adaptive', 'learners'), ('experts', 'experts'))


def export(
  run: Run,
  path: str | os.PathLike,
  format: Format = 'safetensors',
  *,
  dense: bool = False,
) -> None:
  """Writes a folder that has all of a model: weights, sizes, what it reads.

  `safetensors` is our own format, of any model, which `load` reads anywhere.
  `huggingface` writes what `transformers` reads as ViTForImageClassification,
  or a DeiT where there is a distillation token, or as the language model of
  `convert.lm.FAMILIES` that computes the same; and `timm` what
  `timm.create_model('local-dir:FOLDER')` does. These two hold dense models.

  No absolute path is written: of those in the run's config, such as that of its
  data, the last part stays.

  Args:
    run: what `load` returned.
    path: of the folder, which is made; files in it are replaced.
    format: for whom.
    dense: of a routed or pruned model, write the dense model that its weights
      would be without: the library then computes something else. Learners and
      experts leave none. A routed language model's routers lie beside, in
      `routers.safetensors`.

  Raises:
    UserError: the format cannot say what the model does; or the folder is that
      of a run, or cannot be written.
  """
  writers = {'safetensors': _ours, 'huggingface': _huggingface, 'timm': _timm}
  write = config_lib.choose(format, writers, 'format')
  if write is not _ours:
    _check_dense(run, format, dense)
  folder = pathlib.Path(path).expanduser()
  if workdir.holds_run(folder) or workdir.checkpoints(folder).exists():
    raise UserError(
      f'{folder} is the directory of a run, of which an export would replace'
      ' config.json: name another folder.'
    )
  try:
    written = write(run, folder)
    # What an earlier model has left there would be taken for this one's.
    for name in {FOLDER, ROUTERS} - written:
      (folder / name).unlink(missing_ok=True)
  except OSError as error:
    raise UserError(
      f'{folder} cannot be written ({error.strerror}): name a folder that can.'
    ) from error


def _check_dense(run, format, dense):
  config = run.config
  if isinstance(config, LMConfig) and format != 'huggingface':
    raise UserError(
      f"format={format!r} holds vision transformers: use 'huggingface' or"
      " 'safetensors' for a language model."
    )

  def has(parts):
    return [said for name, said in parts if getattr(config, name, None)]

  if gone := has(_REPLACED):
    raise UserError(
      f'format={format!r} has no {" and no ".join(gone)}, of which no dense'
      " model is left: use 'safetensors'."
    )
  lost = has(_OURS)
  if isinstance(config, DynamicViTConfig):
    lost.append('the dropping of patches')
  if lost and not dense:
    raise UserError(
      f'{_READERS[format]} cannot run {" or ".join(lost)}. Export as'
      " 'safetensors' (for mod_jax), or with dense=True (--export_dense): the"
      ' same weights, every block dense, other outputs.'
    )


def _json(path, fields):
  text = json.dumps(fields, indent=2, ensure_ascii=False) + '\n'
  paths.write_bytes(path, text.encode())


# Each of the following returns which of FOLDER and ROUTERS it has written.


def _ours(run, folder):
  flat = {
    name: np.asarray(array)
    for name, array in trees.by_path(dict(run.variables)).items()
  }
  files.write(folder / WEIGHTS, flat)
  files.remove_others(folder, {WEIGHTS})
  experiment = run.experiment
  if experiment is None and run.task is not None:
    experiment = run.task.config
  fields: dict[str, Any] = {
    'model': _config(run.config),
    'experiment': experiment and _local(_config(experiment)),
    'preprocess': run.preprocess and dataclasses.asdict(run.preprocess),
    'classes': run.classes and list(run.classes),
    'foreign': run.foreign,
  }
  if isinstance(run.config, LMConfig):
    kind, source = run.task.modality.tokenizer_source
    fields['tokenizer'] = kind
    tokenizers.copy(kind, source, os.fspath(folder))
  _json(folder / FOLDER, fields)
  return {FOLDER}


def _config(instance) -> dict[str, Any]:
  fields = json.loads(config_lib.to_json(instance))
  return {'type': type(instance).__name__} | fields


def _local(value):
  """Returns JSON in which absolute paths have their last part alone.

  The rest tells of the machine that they are of, and of nothing elsewhere.
  """
  if isinstance(value, dict):
    return {name: _local(x) for name, x in value.items()}
  if isinstance(value, list):
    return list(map(_local, value))
  if isinstance(value, str):
    # Globs are separated by commas, and alternatives stand in braces.
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
  files.remove_others(folder, {WEIGHTS})


def _names(run) -> list[str]:
  count = run.config.dense_twin().num_classes
  return list(run.classes or (f'LABEL_{i}' for i in range(count)))


def _language(run, folder):
  params = run.variables['params']
  kind, source = run.task.modality.tokenizer_source
  tokenizers.copy(kind, source, os.fspath(folder))
  convert_lm.save(
    *(folder, params, run.config),
    like=run.origin if run.origin and os.path.isdir(run.origin) else None,
    length=run.experiment.data.length,
    tokenizer=run.tokenizer,
  )
  routers = {
    name: np.asarray(array)
    for name, array in trees.flatten(params).items()
    if re.search('(^|/)(router|predictor)/', name)
  }
  if not routers:
    return set()
  files.write(folder / ROUTERS, routers)
  return {ROUTERS}


def _huggingface(run, folder):
  if isinstance(run.config, LMConfig):
    return _language(run, folder)
  _dense_weights(run, folder, 'huggingface')
  dense, names = run.config.dense_twin(), _names(run)
  kind, model = 'vit', 'ViTForImageClassification'
  if dense.distilled:
    kind, model = 'deit', 'DeiTForImageClassification'
    if dense.distillation_head:
      model = 'DeiTForImageClassificationWithTeacher'
  _json(
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
      'id2label': {str(i): name for i, name in enumerate(names)},
      'label2id': {name: i for i, name in enumerate(names)},
    },
  )
  reads = run.preprocess
  whole = round(reads.image_size / reads.crop_fraction)
  squashes = reads.resize == 'squash'
  _json(
    folder / 'preprocessor_config.json',
    {
      # Unlike ViT's own, it crops in all versions of the library.
      'image_processor_type': 'DeiTImageProcessor',
      'do_resize': reads.resize != 'none',
      'size': _square(whole) if squashes else {'shortest_edge': whole},
      'resample': int(reads.resample),
      'do_center_crop': not squashes or whole != reads.image_size,
      'crop_size': _square(reads.image_size),
      'do_rescale': True,
      'rescale_factor': 1 / 255,
      'do_normalize': True,
      'image_mean': list(reads.mean),
      'image_std': list(reads.std),
    },
  )
  return set()


def _square(side: int) -> dict[str, int]:
  return {'height': side, 'width': side}


def _ratio(hidden: int, width: int) -> float:
  """Returns what `int` of its product with the width gives the MLP's."""
  ratio = hidden / width
  return ratio if int(width * ratio) == hidden else math.nextafter(ratio, 99)


def _crop_pct(reads) -> float:
  """Returns what timm's rounding down makes our number of pixels of."""
  whole = round(reads.image_size / reads.crop_fraction)
  fraction = reads.image_size / whole
  exact = math.floor(reads.image_size / fraction) == whole
  return fraction if exact else math.nextafter(fraction, 0)


def _timm(run, folder):
  dense, reads = run.config.dense_twin(), run.preprocess
  if dense.norm_epsilon != _TIMM_EPSILON:
    raise UserError(
      f"format='timm' has norm_epsilon={_TIMM_EPSILON:g} alone, and this model"
      f' {dense.norm_epsilon:g}, so it would compute something else there: use'
      " 'huggingface' or 'safetensors'."
    )
  if reads.resize == 'none':
    raise UserError(
      "format='timm' has no preprocessing that leaves the size of pictures as"
      " it is: use 'huggingface' or 'safetensors'."
    )
  _dense_weights(run, folder, 'timm')
  kind = 'vit_base_patch16_224'
  if dense.distilled:
    kind = 'deit_base_distilled_patch16_224'
  size = [3, dense.image_size, dense.image_size]
  _json(
    folder / 'config.json',
    {
      # Its sizes are those of the arguments.
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
      'pretrained_cfg': {
        'num_classes': dense.num_classes,
        'input_size': size,
        'fixed_input_size': True,
        'crop_pct': _crop_pct(reads),
        'crop_mode': 'squash' if reads.resize == 'squash' else 'center',
        'interpolation': reads.resample.name.lower(),
        'mean': list(reads.mean),
        'std': list(reads.std),
        'first_conv': 'patch_embed.proj',
        'classifier': ['head', 'head_dist'] if dense.distilled else 'head',
      },
    },
  )
  return set()
