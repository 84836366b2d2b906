"""What loading, routing and exporting refuse, with the way out."""

import dataclasses
import functools
import pathlib

import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.pretrained.source import Source
from mod_jax.runs import workdir as workdir_lib

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / 'tests' / 'golden'
VIT_FILE, LM_FOLDER = GOLDEN / 'vit_timm.safetensors', GOLDEN / 'lm_eval/model'
PHOTOS = config_lib.load(ROOT / 'configs' / 'vit' / 'folder.py')
FILES = config_lib.load(ROOT / 'configs' / 'lm' / 'files.py')
ADAPTED = dataclasses.replace(tiny.LM, lora=LoRAConfig(rank=2))


@functools.cache
def vit():
  return mod_jax.load(VIT_FILE, num_heads=3)


@functools.cache
def language():
  return mod_jax.load(LM_FOLDER)


def speech():
  return dataclasses.replace(vit(), config=Wav2Vec2Config())


def seeing():
  return dataclasses.replace(vit(), config=VLMConfig())


def route(method, run=vit, **settings):
  mod_jax.route(run(), method, **settings)


def export(folder, format, run=vit, **model):
  """Exports a run as if its model were another; its weights are not reached."""
  config = dataclasses.replace(run().config, **model)
  mod_jax.export(dataclasses.replace(run(), config=config), folder, format)


def export_over_a_run(folder, format):
  config = tiny.experiment(tiny.VIT)
  tiny.save_run(folder / 'run', config, tiny.random_params(tiny.VIT))
  mod_jax.export(mod_jax.load(folder / 'run'), folder / 'run', format)


def export_over_a_file(folder):
  (folder / 'file').write_text('')
  mod_jax.export(vit(), folder / 'file')


def read_too_early(folder):
  workdir_lib.claim(folder / 'run', tiny.experiment())
  Source.open(folder / 'run').read()


def complete(file, variant, **changes):
  file.complete(config_lib.replace(file.get_config(variant), changes))


# What is said, but for what stands at …: the offender, and the way out.
REFUSED = {
  # Paths.
  'nothing … no such file': lambda path: mod_jax.load(path / 'nothing'),
  'holds no': mod_jax.load,
  'holds no checkpoint yet': read_too_early,
  'say it by num_heads': lambda _: mod_jax.load(VIT_FILE),
  'num_heads: … config is known': (
    lambda _: mod_jax.load(LM_FOLDER, num_heads=3)
  ),
  # What to predict.
  'nothing.jpg': lambda _: vit().predict('nothing.jpg'),
  'shape (4, 4)': lambda _: vit().predict(np.zeros((4, 4), np.uint8)),
  'give strings': lambda _: language().predict(np.zeros(3)),
  'not a str … run.preprocess': lambda _: vit().apply('cat.jpg'),
  'not a PosixPath … run.encode': lambda path: language().apply([path]),
  'token ids … vocab_size … own tokenizer': (
    lambda _: language().apply(np.full((1, 2), 9999))
  ),
  'say on which': lambda _: vit().evaluate(),
  'not from a run of ours … TextData': lambda _: language().evaluate(),
  'batches=-1 … 0, for all': lambda _: language().evaluate(batches=-1),
  # Formats.
  "unknown format 'onnx'": lambda path: export(path, 'onnx'),
  'file … cannot be written': export_over_a_file,
  'gs:// … is a URL': lambda _: export('gs://bucket/out', 'safetensors'),
  "dense=True … 'safetensors' holds": lambda path: mod_jax.export(
    mod_jax.route(vit()), path, dense=True
  ),
  'is the directory of a run': (
    lambda path: export_over_a_run(path, 'safetensors')
  ),
  'norm_epsilon=1e-06 alone … 1e-12': (
    lambda path: export(path, 'timm', norm_epsilon=1e-12)
  ),
  'cannot run routed blocks … dense=True': (
    lambda path: export(path, 'timm', routing=VisionRoutingConfig())
  ),
  'timm cannot run … learners': (
    lambda path: export(path, 'timm', adaptive=AdaptiveConfig())
  ),
  "'safetensors' for a language": (lambda path: export(path, 'timm', language)),
  "timm … 'safetensors' for a model that sees": (
    lambda path: export(path, 'timm', seeing)
  ),
  "peft … 'safetensors' for a model that sees": (
    lambda path: export(path, 'peft', seeing)
  ),
  'no model of speech': lambda path: export(path, 'huggingface', speech),
  'transformers cannot run routed blocks … dense=True': (
    lambda path: export(path, 'huggingface', language, routing=MoDConfig())
  ),
  # Conversions.
  'conditional already': lambda _: mod_jax.route(mod_jax.route(vit()), 'mod'),
  'adapters: export it': lambda _: route(
    'mod', lambda: tiny.run(tiny.experiment(ADAPTED))
  ),
  "unknown method 'tomme'": lambda _: route('tomme'),
  'objective.budget': lambda _: route('acm', capacity=0.5),
  'amod … take one of mod, acm': lambda _: route('amod', language),
  "Did you mean 'capacity'": lambda _: route('amod', capcity=0.5),
  "dtype='int4' … bfloat16": lambda _: mod_jax.load(LM_FOLDER, dtype='int4'),
  'capacity=2': lambda _: route('amod', capacity=2.0),
  # Configs that files complete.
  'nowhere … is no directory': (
    lambda path: complete(PHOTOS, 'amod', **{'data.path': f'{path}/nowhere'})
  ),
}


@pytest.mark.parametrize('said', REFUSED)
def test_says_what_and_the_way_out(tmp_path, said):
  with pytest.raises(UserError) as error:
    REFUSED[said](tmp_path)
  for part in said.split(' … '):
    assert part in str(error.value)
