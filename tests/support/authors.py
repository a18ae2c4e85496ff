"""What the authors' own code says: the whole set beside the repository where it is there, else the sample in it."""

from pathlib import Path

from support import GOLDEN, ROOT

SAMPLE = GOLDEN / "authors"
BESIDE = [folder / "shared" / "golden" for folder in ROOT.parents]
WHOLE = next((folder for folder in BESIDE if folder.is_dir()), None)
FOLDER: Path = WHOLE or SAMPLE
CHECKPOINTS = sorted(FOLDER.glob("authors_*.pt"))
