"""Stored values are what they were declared as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from salgp.io import FormatError
from salgp.io.serialize import pack, storable, unpack
from salgp.network.reader import Reader, reader_from, reader_header


@storable
@dataclass(frozen=True)
class Switch:
    """A value with a truth value and a word."""

    on: bool
    name: str
    level: float = 0.5


def test_a_value_comes_back_as_it_was() -> None:
    tensors: dict[str, Any] = {}
    assert unpack(pack(Switch(True, "lamp"), tensors), tensors) == Switch(True, "lamp")


@pytest.mark.parametrize("field", [{"on": 0.5}, {"on": -1}, {"on": "no"}, {"on": None}, {"name": 3}])
def test_truth_values_and_words_are_not_taken_for_others(field: dict[str, Any]) -> None:
    stored = pack(Switch(True, "lamp"), {})
    stored["fields"] |= field
    with pytest.raises(FormatError, match="expected a"):
        unpack(stored, {})


@pytest.mark.parametrize("pooling", [-1, 0.5, ["auto"], {"a": 3}])
def test_a_stored_pooling_is_a_name(pooling: Any) -> None:
    header = {**reader_header(Reader()), "pooling": pooling}
    with pytest.raises(TypeError, match="name of a pooling"):
        reader_from(header, None, None)
