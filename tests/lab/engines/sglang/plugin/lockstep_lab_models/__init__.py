"""What the lab serves. SGLANG_EXTERNAL_MODEL_PACKAGE names it, so the engine imports its 200 others only if asked."""
