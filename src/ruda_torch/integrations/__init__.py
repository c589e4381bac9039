"""Callbacks for training frameworks: one small file per framework, which imports it."""
