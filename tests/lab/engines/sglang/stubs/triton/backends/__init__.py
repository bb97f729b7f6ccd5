"""Stand-in for Triton: no backend, so nobody believes that it could compile."""

backends: dict[str, object] = {}
