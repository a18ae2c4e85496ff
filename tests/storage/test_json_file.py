"""Files that should hold a JSON object, and do not."""

import pytest

from gambit.config.presets import preset_for
from gambit.errors import UserError
from gambit.models.files import number_on_disk
from gambit.verifiers.families import family_of
from support.tables import table


@table("text", ["[]", "5", "{", "", '{"a":' * 100_000, "\xff"])
def test_what_is_no_object_is_refused_by_its_name(tmp_path, text):
    for name in ("config.json", "gambit.json"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    for read in (
        family_of,
        lambda folder: number_on_disk(str(folder), "hidden_size"),
        lambda folder: preset_for("a model", folder),
    ):
        with pytest.raises(UserError, match=r"(config|gambit)\.json is not a "):
            read(tmp_path)
