"""Input pipelines: text for language models."""
