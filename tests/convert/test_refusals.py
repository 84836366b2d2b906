"""What is no model, or another one, is told by name with the way out.

Each row is a function of an empty directory, and what stands in its sentence.
"""

import dataclasses
import json
import pathlib
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import tiny

from mod_jax import config as config_lib
from mod_jax.convert import beside, clip, detr, files, llava, lm, vit, wav2vec2
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
TIMM = GOLDEN / 'vit_timm.safetensors'
ONE_HEAD = GOLDEN / 'vit_huggingface_one_head.safetensors'
VIT = vit.derive(TIMM, num_heads=3)
DISTILLED = vit.derive(ONE_HEAD, num_heads=3)
INDEX = 'model.safetensors.index.json'


def change(config, **fields):
  return dataclasses.replace(config, **fields)


def read(tmp, name, data):
  (tmp / name).write_bytes(data)
  return files.read(tmp / name)


def read_array(tmp, name, array):
  files.write(tmp / name, {'x': np.float32([1, array])})
  return files.read(tmp / name)


def read_object(tmp):
  np.savez(tmp / 'w.npz', x=np.array([{}], dtype=object))
  return files.read(tmp / 'w.npz')


def read_quantised(tmp):
  array = {'dtype': 'F8_E4M3', 'shape': [2], 'data_offsets': [0, 2]}
  header = json.dumps({'x': array}).encode()
  data = struct.pack('<Q', len(header)) + header + bytes(2)
  return read(tmp, 'w.safetensors', data)


def find(tmp, name):
  (tmp / 'weights.npz').touch()
  return files.find(tmp / name)


def pickled(tmp, value, **entries):
  with zipfile.ZipFile(tmp / 'w.pth', 'w') as file:
    data = pickle.dumps(value, protocol=2)
    for name, entry in {'data.pkl': data, **entries}.items():
      file.writestr(f'x/{name}', entry)
  return files.read(tmp / 'w.pth')


def told(tmp, **fields):
  (tmp / 'config.json').write_text(json.dumps(fields))
  return beside.read(tmp / 'model.safetensors')


def copy(tmp, name='lm/llama', **fields):
  """Copies a golden model, and changes its config."""
  folder = pathlib.Path(shutil.copytree(GOLDEN / name, tmp / name))
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  return folder


def sharded(tmp, without=None, **entries):
  """Reads a model in three files, one missing or the index changed."""
  folder = copy(tmp, 'lm/llama_sharded')
  if without:
    (folder / without).unlink()
  index = json.loads((folder / INDEX).read_text())
  index['weight_map'] |= {k.replace('_', '.'): x for k, x in entries.items()}
  (folder / INDEX).write_text(json.dumps(index))
  return files.stored(folder)


def cut_short(tmp):
  path = copy(tmp) / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-100])
  return files.stored(path.parent)


def read_lm(tmp, arrays=None, **fields):
  """Reads a golden language model with more arrays, by a changed config."""
  folder = copy(tmp)
  path = folder / 'model.safetensors'
  arrays = safetensors.numpy.load_file(path) | (arrays or {})
  safetensors.numpy.save_file(arrays, path)
  return lm.read(folder, change(lm.derive(folder), **fields))


def save_lm(tmp, **fields):
  config = lm.derive(GOLDEN / 'lm' / 'llama')
  params = tiny.arrays(lm.read(GOLDEN / 'lm' / 'llama', config))
  lm.save(tmp, params, change(config, **fields))


def derive_cut(tmp):
  arrays = files.read(TIMM)
  del arrays['pos_embed']
  files.write(tmp / 'w.npz', arrays)
  return vit.derive(tmp / 'w.npz', num_heads=3)


def load_foreign(tmp):
  files.write(tmp / 'w.npz', {'embedding/kernel': np.zeros(1, np.float32)})
  return vit.load(tmp / 'w.npz', VIT)


def save_vit(tmp, **fields):
  vit.save(tmp / 'new.npz', vit.load(TIMM, VIT), change(VIT, **fields))


def save_llava(tmp, **fields):
  config = llava.derive(GOLDEN / 'vlm' / 'llava')
  params = tiny.arrays(llava.read(GOLDEN / 'vlm' / 'llava', config))
  llava.save(tmp / 'new.npz', params, config_lib.replace(config, fields))


WINDOW_OF_SOME = {
  **{'model_type': 'qwen2', 'use_sliding_window': True, 'sliding_window': 5},
  **{'max_window_layers': 1, 'layer_types': None},
}
YARN = {'rope_type': 'yarn', 'factor': 2.0}
HALF = {'partial_rotary_factor': 0.5}
# Folders whose config says what is not computed here.
FOLDERS = [
  (lm, 'lm/llama', {'model_type': 'gpt_neox'}, "'gpt_neox'", 'expected llama'),
  (lm, 'lm/llama', {'hidden_act': 'relu'}, "hidden_act='relu'", "'silu'"),
  (lm, 'lm/llama', {'attention_bias': True}, 'attention_bias=True', 'expected'),
  (lm, 'lm/llama', {'quantization_config': {}}, 'quantization_config'),
  (lm, 'lm/llama', {'is_causal': False}, 'is_causal=False'),
  # Its `rope_parameters` say less than what somebody has added.
  (lm, 'lm/llama', {'rope_scaling': YARN}, "rope_type='yarn'"),
  (lm, 'lm/llama', {'rope_parameters': HALF}, 'partial_rotary_factor=0.5'),
  (lm, 'lm/llama', WINDOW_OF_SOME, 'some layers', 'the same for all'),
  (detr, 'detr', {'encoder_attention_heads': 4}, 'encoder_attention_heads'),
  (detr, 'detr', {'activation_function': 'gelu'}, "activation_function='gelu'"),
  (wav2vec2, 'wav2vec2/layer', {'conv_bias': False}, 'conv_bias=False'),
  (wav2vec2, 'wav2vec2/layer', {'layer_norm_eps': 0.01}, 'layer_norm_eps='),
  (detr, 'detr', {'encoder_attention_heads': [4]}, 'expected an integer'),
  (detr, 'detr', {'backbone_config': {'hidden_act': 'gelu'}}, 'hidden_act='),
  (detr, 'detr', {'backbone_kwargs': {'output_stride': 16}}, 'output_stride='),
  (detr, 'detr', {'auxiliary_loss': True}, 'auxiliary_loss=True'),
  (clip, 'vlm/clip', {'hidden_act': 'gelu'}, 'hidden_act', 'quick_gelu'),
  (clip, 'vlm/clip', {'vision_config': None}, 'vision_config=None'),
  (
    llava,
    'vlm/llava',
    {'projector_hidden_act': 'relu'},
    'projector_hidden_act',
  ),
  (llava, 'vlm/llava', {'text_config': None}, 'text_config=None', 'an object'),
  (llava, 'vlm/llava', {'image_token_index': 30}, "the language model's 30"),
  (
    *(llava, 'vlm/llava', {'vision_feature_select_strategy': 'full'}),
    *('select_strategy', 'default'),
  ),
]
ADAPTIVE = {'adaptive': AdaptiveConfig(num_learners=2)}

TABLE = [
  # Files.
  (
    lambda t: read(t, 'w.safetensors', b'nonsense'),
    'as safetensors',
    'damaged',
  ),
  (lambda t: read(t, 'w.h5', b''), "'.h5'", '.safetensors or .npz or .pth'),
  (read_object, 'cannot be read as npz'),
  (read_quantised, 'x is of type F8_E4M3', 'expected F64'),
  (lambda t: read_array(t, 'w.safetensors', np.nan), 'x holds', 'not finite'),
  (lambda t: read_array(t, 'w.pth', np.nan), 'x holds', 'not finite'),
  (lambda t: find(t, 'weihgts.npz'), 'no such file', 'weights.npz'),
  (
    lambda t: find(t, 'nowhere/w.npz'),
    'no such file',
    '`hf download OWNER/NAME',
  ),
  (files.find, 'holds no model.safetensors', 'config.json'),
  (lambda t: pickled(t, {'x': 1}), "'x'", 'no tensor', 'state_dict'),
  (lambda t: pickled(t, {}, **{'constants.pkl': b''}), 'TorchScript'),
  # What lies beside the weights.
  (
    lambda t: told(t, num_attention_heads=0),
    'config.json: num_attention_heads=0',
  ),
  (lambda t: told(t, layer_norm_eps='1e-6'), 'layer_norm_eps=', 'expected'),
  (lambda t: told(t, image_size=[64, 16]), 'image_size=(64, 16)', 'twice'),
  (lambda t: told(t, global_pool='avg'), "global_pool='avg'", "'token'"),
  (lambda t: told(t, model_args={'act_layer': 'relu'}), "act_layer='relu'"),
  # Language models.
  (
    lambda t: sharded(t, 'model-00002-of-00003.safetensors'),
    'lacks model-00002',
  ),
  (lambda t: sharded(t, model_norm_weight='../secret'), '../secret', 'refused'),
  (
    lambda t: sharded(t, more='model-00002-of-00003.safetensors'),
    *('more is in none', 'fetch them again'),
  ),
  (cut_short, 'cannot be read as safetensors', 'cut short'),
  (files.stored, 'holds neither', 'in safetensors'),
  (
    lambda t: read_lm(t, arrays={'model.layers.0.self_attn.sinks': np.ones(2)}),
    'self_attn.sinks',
  ),
  (lambda t: read_lm(t, mlp_dim=21), 'down_proj'),
  (lambda t: save_lm(t, mlp='gelu'), "mlp='gelu'", "mlp='swiglu'"),
  # Vision transformers.
  (derive_cut, 'image_size', 'fetch it again'),
  (load_foreign, 'embedding/kernel', 'convert it'),
  (
    lambda t: vit.load(ONE_HEAD, change(DISTILLED, distillation_head=True)),
    'distillation_head=False',
  ),
  (lambda t: save_vit(t, **ADAPTIVE), 'adaptive', 'dense_twin'),
  (lambda t: save_vit(t, experts=ExpertsConfig()), 'experts', 'dense_twin'),
  (lambda t: save_vit(t, num_layers=3), 'missing: block_2/mlp/up/kernel'),
  (
    lambda t: vit.names(change(VIT, distilled=True), 'torchvision'),
    *('distillation_token', 'torchvision'),
  ),
  # Models that see and read.
  (lambda t: clip.fields_of(tiny.VIT), 'num_classes=10', 'towers of CLIP'),
  (lambda t: save_llava(t, pooling=3), 'pooling=3', 'no file of its format'),
  (
    lambda t: llava.max_length(
      copy(t, 'vlm/llava', text_config={'max_position_embeddings': 'x'})
    ),
    "max_position_embeddings='x'",
  ),
]


TABLE += [
  (lambda t, row=row: row[0].derive(copy(t, row[1], **row[2])), *row[3:])
  for row in FOLDERS
]


@pytest.mark.parametrize(
  ('call', 'named'),
  [(x[0], x[1:]) for x in TABLE],
  ids=[', '.join(x[1:]) for x in TABLE],
)
def test_is_refused_and_nothing_is_written(tmp_path, call, named):
  with pytest.raises(UserError) as caught:
    call(tmp_path)
  assert all(text in str(caught.value) for text in named), caught.value
  assert not (tmp_path / 'new.npz').exists()
