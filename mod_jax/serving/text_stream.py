"""The text of tokens that come one by one."""

from absl import logging

from mod_jax.data import tokenizers


class TextStream:
  """Tells what is certain of a text: no half characters, no stop texts.

  Attributes:
    stopped: whether a stop text was met, after which nothing is added.
    failed: whether the tokenizer has failed, after which it is not asked again.
  """

  def __init__(self, tokenizer, prompt: list[int], stop: tuple[str, ...]):
    """Begins after a prompt.

    Args:
      tokenizer: of the model; None for one without, whose texts are empty.
      prompt: tokens before.
      stop: texts before which the text ends.
    """
    self._tokenizer = tokenizer
    self._stop = stop
    self._tokens = []  # Of which the text is not told yet.
    self._before = prompt[-tokenizers.CONTEXT :]  # Of which it is.
    self._held = ''
    self.stopped = self.failed = False

  def add(self, token: int) -> str:
    """Returns what has become certain with a token."""
    if self._tokenizer is None:
      return ''
    self._tokens.append(token)
    found = ''
    while self._tokens:
      count = len(self._tokens)
      text = self._decoded(count)
      if text.endswith(tokenizers.REPLACEMENT):
        if count < tokenizers.CONTEXT:
          break  # A character of which bytes are missing.
        count = 1  # The first byte is astray; others may begin a character.
        text = self._decoded(count)
      self._before = self._tokens[:count][-tokenizers.CONTEXT :]
      del self._tokens[:count]
      found += text
    return self._release(found)

  def end(self) -> str:
    """Returns what was held back."""
    if self._tokenizer is None or self.stopped:
      return ''
    text = self._release(self._decoded(len(self._tokens)))
    if not self.stopped:
      text, self._held = text + self._held, ''
    return text

  def _decoded(self, count) -> str:
    if self.failed:
      return ''
    try:
      return self._tokenizer.decode_after(self._before, self._tokens[:count])
    except Exception as error:  # It may be a stranger's.
      logging.warning('tokens cannot be turned into text: %s', error)
      self.failed = True
      return ''

  def _release(self, new: str) -> str:
    text = self._held + new
    at = [text.find(stop) for stop in self._stop]
    found = [i for i in at if i >= 0]
    if found:
      self.stopped, self._held = True, ''
      return text[: min(found)]
    keep = max(
      (
        n
        for stop in self._stop
        for n in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:n])
      ),
      default=0,
    )
    cut = len(text) - keep
    self._held = text[cut:]
    return text[:cut]
