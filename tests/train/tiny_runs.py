"""Runs of the smallest language model."""

import dataclasses

import tiny

from mod_jax.data.text import TextDataConfig


def make_config(texts, routing=None, **changes):
  """Returns a config of four steps over the files that a glob names."""
  return tiny.experiment(
    dataclasses.replace(tiny.LM, num_layers=1, routing=routing),
    TextDataConfig(source='files', files=texts, length=16),
    **{'evaluation.sample_tokens': 0, **changes},
  )
