"""Adapters for training frameworks, each imported only when its framework is."""
