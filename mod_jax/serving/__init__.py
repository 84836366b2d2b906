"""Serves language models: slots, engine, HTTP."""
