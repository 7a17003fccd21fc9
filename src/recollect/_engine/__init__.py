"""The engines: frames with their replays, the reentrant variant, and groups of backward calls."""
