"""Files of training data: JSON lines, or a folder that `datasets` loads, and its way to the hub."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gambit.errors import UserError
from gambit.export.samples import Purpose, Sample
from gambit.storage.run_folder import check_new_file

DATA_FILE = "train.jsonl"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {data}
---

# {rows:,} rows for {purpose}

Made by `gambit export --as {purpose}` from event logs. Each row names its model, a hash of its weights, the benchmark
and the problem; `judged_by` says if a trace counts as right by the benchmark's answer or by the vote of its search.

| model | weights | benchmark | rows |
|---|---|---|---|
{table}
"""


def write_samples(samples: Iterable[Sample], out: Path, purpose: Purpose) -> int:
    """Writes rows as they come, to a new .jsonl or into a new folder with a card; returns their number."""
    is_file = out.suffix == ".jsonl"
    data = out if is_file else out / DATA_FILE
    check_new_file(data)
    data.parent.mkdir(parents=True, exist_ok=True)
    origins: Counter[tuple[str, ...]] = Counter()
    with data.open("x", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample, ensure_ascii=False, separators=(",", ":")) + "\n")
            origins[tuple(str(sample[name]) for name in ("model", "weights", "benchmark"))] += 1
    count = origins.total()
    if count == 0:
        data.unlink()
        raise UserError(f"these runs hold nothing for {purpose}: it takes complete traces with an answer"
                        f"{', right and wrong ones' if purpose is Purpose.DPO else ''}")  # fmt: skip
    if not is_file:
        table = "\n".join(f"| {' | '.join(origin)} | {rows:,} |" for origin, rows in sorted(origins.items()))
        card = CARD.format(data=DATA_FILE, rows=count, purpose=purpose, table=table)
        (out / "README.md").write_text(card, encoding="utf-8")
    return count


def push(folder: Path, repository: str, *, is_public: bool) -> str:
    """Uploads a folder as a dataset, private unless told otherwise; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(repository, repo_type="dataset", private=not is_public, exist_ok=False)
        api.upload_folder(repo_id=repository, repo_type="dataset", folder_path=folder)
    except (HfHubHTTPError, RepositoryNotFoundError, ValueError, OSError) as error:
        raise UserError(f"{repository} was not uploaded ({error}): the rows are in {folder}; log in with `hf auth "
                        "login`, or choose the name of a new dataset") from error  # fmt: skip
    return str(address)
