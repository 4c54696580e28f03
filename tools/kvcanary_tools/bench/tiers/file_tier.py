"""The example of docs/tiers.md around files."""

from pathlib import Path

import numpy as np

from kvcanary import Tier


class FileTier:
    """KV of prefixes in files, each with its seal beside it."""

    def __init__(self, folder: Path, seed: int | None = None, mode: str = "log") -> None:
        self.folder, self.tier = folder, Tier(seed, name="file tier", mode=mode)

    def save(self, key: str, kv: np.ndarray) -> None:
        seal = self.tier.put(key, kv)
        (self.folder / f"{key}.kv").write_bytes(kv.tobytes())
        (self.folder / f"{key}.seal").write_bytes(seal.to_bytes())

    def load(self, key: str) -> bytes | None:
        """None is a miss: the prompt is computed again."""
        try:
            kv, seal = ((self.folder / f"{key}.{kind}").read_bytes() for kind in ("kv", "seal"))
        except FileNotFoundError:
            return None
        return kv if self.tier.check(key, kv, seal) else None
