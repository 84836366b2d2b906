"""From a directory or a file to a model that reads pictures or texts."""
