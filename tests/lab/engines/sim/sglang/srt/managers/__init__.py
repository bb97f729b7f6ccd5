"""Simulator's stand-in for a module of SGLang; not SGLang."""
