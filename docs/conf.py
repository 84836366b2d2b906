"""How Sphinx builds the site: `make docs`."""

import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT), str(ROOT / 'kernels')]

# After the path above, on which some of these lie.
from docutils import nodes  # noqa: E402
import generate  # noqa: E402
from latex2mathml import converter  # noqa: E402

import mod_jax  # noqa: E402

project = 'mod_jax'
release = mod_jax.__version__
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
exclude_patterns = ['_build']

# Notebooks are stored with their output, and a test runs them.
nb_execution_mode = 'off'
# An annotated type or a module's repr may hold an address in memory.
nb_merge_streams = True
myst_enable_extensions = ['amsmath', 'dollarmath']
myst_heading_anchors = 3

# Quotes and dashes in values are as one would type them.
smartquotes = False

# In docstrings, `name` is code.
default_role = 'code'
autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_use_rtype = False

# Formulas as browsers show them by themselves, so that the site reads offline.
html_math_renderer = 'mathml'
html_theme = 'furo'
html_title = 'mod_jax'


def mark_code(app, what, name, obj, options, lines):
  """Marks code in a docstring, which is indented by four as in Markdown."""
  for i in range(len(lines) - 1, 1, -1):
    before = next((line for line in reversed(lines[:i]) if line.strip()), '')
    depth = len(before) - len(before.lstrip())
    if not lines[i - 1].strip() and lines[i].startswith(' ' * (depth + 4)):
      lines[i:i] = [f'{" " * depth}::', '']


def link_pages(app, docname, source):
  """Has links to code lead to the pages that are made of it.

  The pages are made with the site. Where a repository shows the Markdown, they
  are not there, and the code is.
  """
  classes = {cls.__name__ for cls in generate.classes()}
  api = {
    module: page.relative_to(DOCS).as_posix()
    for page in sorted(DOCS.glob('api/*.md'))
    for module in re.findall(r'automodule} (\S+)', page.read_text())
  }

  def link(match):
    label, file = match.groups()
    module = file.removesuffix('.py').replace('/', '.')
    if label in classes:
      page = f'_generated/fields.md#{label.lower()}'
    elif file.startswith('configs/'):
      page = f'_generated/configs.md#{re.sub("[./]", "", file)}'
    elif file == 'configs':
      page = '_generated/configs.md'
    elif module in api:
      page = f'{api[module]}#{module.replace(".", "")}'
    else:
      return match[0]
    return f'[{label}]({"../" * docname.count("/")}{page})'

  source[0] = re.sub(
    r'\[([^\]]+)\]\((?:\.\./)+((?:configs|mod_jax)\b[^)]*)\)', link, source[0]
  )


def show_math(translator, node, display='inline'):
  """Writes a formula as MathML."""
  text = converter.convert(node.astext(), display=display)
  translator.body.append(text)
  raise nodes.SkipNode


def show_block(translator, node):
  show_math(translator, node, 'block')


def setup(app):
  """Has the pages about configs written before anything is read."""
  app.connect('builder-inited', lambda app: generate.write(ROOT, DOCS))
  # Before Napoleon, which takes the indentation of sections away.
  app.connect('autodoc-process-docstring', mark_code, priority=400)
  app.connect('source-read', link_pages)
  app.add_html_math_renderer('mathml', (show_math, None), (show_block, None))
