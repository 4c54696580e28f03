"""Who runs next: intake, admission, retraction, and whether the engine goes on at all."""
