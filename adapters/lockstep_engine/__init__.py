"""The core's engine face: hooks on SGLang and the Engram store. Runs inside the engine's own processes."""
