"""Passages of texts to ask models about."""

import pathlib
import re

from mod_jax.data import corpus, text


def contents(files: list[corpus.TextFile]) -> list[str]:
  return [pathlib.Path(x.path).read_text('utf-8', 'replace') for x in files]


def held_out(config: text.TextDataConfig) -> list[str]:
  """Returns the contents of the files that runs on these texts hold out."""
  return contents(text.split_files(config)[1])


def paragraphs(content: str) -> list[str]:
  """Returns the paragraphs of prose, each as one line."""
  blocks = re.split(r'\n\s*\n', content)
  # Not lists, headings, directives and examples.
  prose = [block for block in blocks if re.match(r'\s*[A-Z]', block)]
  lines = [' '.join(block.split()) for block in prose]
  return [line for line in lines if len(sentences(line)) >= 2]


def sentences(line: str) -> list[str]:
  """Returns the sentences of a paragraph that ends with one, or nothing."""
  return re.split(r'(?<=[.?!]) (?=[A-Z])', line) if line.endswith('.') else []


def questions(content: str) -> list[str]:
  """Returns the headings in reStructuredText that are questions."""
  return re.findall(r'^(\w.+\?)\n[-=]{3}', content, re.MULTILINE)
