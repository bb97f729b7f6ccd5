"""Simulator's stand-in for a module of SGLang; not SGLang."""

__version__ = "0.0.0.dev0+simulator"
