"""Bodies that a hostile client sends: a 400 in one sentence that names the field, whatever the format."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.config.options import SearchConfig
from gambit.serve.http import ApiError, parse_object
from gambit.serve.requests import UNSUPPORTED, ChatFields, RequestReader
from gambit.serve.settings import NOBODY
from support.attacks import ALL, BODIES, OPTIONS, ROWS
from support.tables import table

pytestmark = pytest.mark.unit
READER = RequestReader(("M",), SearchConfig(budget_seconds=100, capacity=16, policy_options={}), 128, lambda _: 64)


def test_there_are_hundreds():
    assert len(ROWS) + len(OPTIONS) > 300


def refused(kind, **fields):
    with pytest.raises(ApiError) as caught:
        READER.read(kind, {**BODIES[kind], **fields}, NOBODY)
    error = caught.value
    assert error.status == (404 if error.code == "model_not_found" else 400), error.message
    assert "\n" not in error.message and len(error.message) < 1000 and error.message.encode()
    assert "Error" not in error.message and "pydantic" not in error.message, "a sentence, and no exception's name"
    return error


@table(("kind", "name", "value"), ROWS)
def test_a_field_of_a_wrong_type_or_size_is_named(kind, name, value):
    error = refused(kind, **{name: value})
    assert name in error.message and (error.param or "").startswith(name), error.message


@table(("name", "value"), OPTIONS)
def test_a_wrong_option_of_the_search_is_named(name, value):
    assert name in refused(ChatFields, gambit={name: value}).message


@table("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_named_in_every_format(name):
    for kind in ALL:
        if name not in {field.alias or own for own, field in kind.model_fields.items()}:
            assert refused(kind, **{name: "surely not this"}).param == name


# -- fuzz: more of it in `make test-all` -----------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({field.alias or name for kind in ALL for name, field in kind.model_fields.items()} | set(UNSUPPORTED))
OF_A_SEARCH = sorted(SearchConfig.model_fields)


@given(st.sampled_from(ALL), st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), values, max_size=5))
def test_any_object_is_a_request_or_an_error_of_its_sender(kind, fields):
    try:
        READER.read(kind, {**BODIES[kind], **fields}, NOBODY)
    except ApiError as error:
        assert error.status in (400, 403, 404) and len(error.message) < 2000 and "\n" not in error.message


@given(st.dictionaries(st.sampled_from(OF_A_SEARCH) | st.text(max_size=8), values, max_size=5))
def test_any_options_of_a_search_are_taken_or_refused(options):
    try:
        READER.read(ChatFields, {**BODIES[ChatFields], "gambit": options}, NOBODY)
    except ApiError as error:
        assert error.status in (400, 403) and "gambit" in (error.param or "gambit")


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
       | values.map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_an_object_or_an_error_of_their_sender(body):
    try:
        found = parse_object(body)
    except ApiError as error:
        assert error.status == 400 and error.message.encode()
    else:
        assert isinstance(found, dict) and json.dumps(found, ensure_ascii=False).encode(), "all of it can be sent again"
