"""What to do with a data set that was made: the command that trains on it, and a section of a model for a laptop."""

import re
from dataclasses import dataclass
from shlex import quote

import yaml

from utils.data.unfinished import SECTION

LAPTOP_TOKENS, BASE_TOKENS = 1024, 4096  # the most of an image; `base` has 4,050
# As the demo's, whose 600 iterations take three minutes on two cores.
LAPTOP = {"embed_dim": 128, "depth": 4, "num_heads": 8, "residual": True, "enable_fused": True, "num_iters": 300}
BATCH = 16
STATS = ("global_means", "global_stds", "time_means")


@dataclass(frozen=True)
class NextStep:
    """Training on a data set in `folder`.

    Attributes:
        shape: of a time step, (C, H, W), its rows from the north.
        samples: for training.
        kinds: of its parts: train, and perhaps valid and test.
        constants: their names.
        section: name of the section to write; None for none.
        is_round: its columns go round the globe.

    Raises ValueError for a name that cannot be that of a section, and where there is nothing to validate with.
    """

    folder: str
    shape: tuple[int, int, int]
    samples: int
    kinds: tuple[str, ...]
    constants: tuple[str, ...] = ()
    section: str | None = None
    is_round: bool = True

    def __post_init__(self):
        if self.section is None:
            return
        if not re.fullmatch(r"[A-Za-z]\w*", self.section):
            raise ValueError(f"--section is {self.section!r}: it takes a name of letters, digits and underscores")
        if "valid" not in self.kinds:
            raise ValueError("--section is for training, which validates: give --valid_from DATE, too")

    @property
    def file(self) -> str:
        """Where the section is, in the folder."""
        return f"{self.section}.yaml"

    def write_section(self) -> str:
        """Return the YAML file."""
        C, keys = self.shape[0], self._size(LAPTOP_TOKENS)
        patch, test = keys["patch_size"], "test" if "test" in self.kinds else "valid"
        keys = LAPTOP | keys | {"n_in_channels": C, "n_out_channels": C, "lr": 1e-3, "warmup": 20, "expdir": "runs"}
        if patch <= 8 and self.is_round:
            keys["patch_overlap"] = patch // 2  # hardly a seam between patches
        if self.constants:
            keys["constants"] = list(self.constants)
        keys |= {f"{kind}_data_path": f"{self.folder}/{kind}" for kind in ("train", "valid")}
        keys |= {"inf_data_path": f"{self.folder}/{test}"}
        keys |= {f"{name}_path": f"{self.folder}/stats/{name}.npy" for name in STATS}
        text = yaml.safe_dump({self.section: keys}, sort_keys=False, default_flow_style=None)
        return f"{SECTION}{C} channels for 2 cores: `{self._command()}`\n{text}"

    def say(self) -> str:
        """Return what to do next."""
        if "valid" not in self.kinds:
            return (
                "Next: a validation set, without which there is no training: make it anew with --valid_from DATE, or "
                "give training another folder with --valid_data_path"
            )
        more = "; with --section NAME comes a section of a model for a laptop" if self.section is None else ""
        return f"Next: {self._command()}{more}"

    def _command(self) -> str:
        if self.section is not None:
            return f"python train.py --yaml_config {quote(f'{self.folder}/{self.file}')} --config {self.section}"
        flags = {"data_dir": quote(self.folder), "expdir": "runs", **self._size(BASE_TOKENS)}
        flags |= {"n_in_channels": self.shape[0], "n_out_channels": self.shape[0]}
        if self.constants:
            flags["constants"] = list(self.constants)
        words = (f"--{name} {' '.join(map(str, x)) if isinstance(x, list) else x}" for name, x in flags.items())
        return f"python train.py --config=base {' '.join(words)}"

    def _size(self, tokens: int) -> dict[str, list[int] | int]:
        """Return patch, image and batch: `tokens` an image at most."""
        _, H, W = self.shape
        patch = pick_patch(H, W, tokens)
        batch = BATCH
        while batch > max(self.samples, 1):
            batch //= 2
        return {"img_size": [H - H % patch, W - W % patch], "patch_size": patch, "global_batch_size": batch}


def pick_patch(H: int, W: int, tokens: int) -> int:
    """Return the smallest patch, of 4 points or more, that makes so many tokens at most.

    If there is one, a patch that divides the columns and leaves no row or one (the south pole); else one that divides
    the columns; else any. Small grids have patches of 1.
    """
    sizes = [p for p in range(4, min(H, W) + 1) if (H // p) * (W // p) <= tokens]
    for suits in (lambda p: W % p == 0 and H % p <= 1, lambda p: W % p == 0, lambda p: True):
        for p in filter(suits, sizes):
            return p
    return 1
