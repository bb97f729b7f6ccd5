"""Simulator's stand-in for a module of SGLang; not SGLang. What it says is what the simulator answers."""

ANSWER = "The simulator says: 2 + 2 is 4."
