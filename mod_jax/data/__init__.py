"""Input pipelines: text for language models, and labelled images."""
