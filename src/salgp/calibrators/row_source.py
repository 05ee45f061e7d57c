"""Rows that do not fit into memory, as `Calibrator.fit_stream` asks for them; feature stores answer it.

A method is fitted out of core by a sample of the rows in memory and by passes over all rows, each of which
adds up what the rows say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from salgp.features import Features

__all__ = ["Source"]


class Source(Protocol):
    """Labelled rows of any number."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def has_reference(self) -> bool:
        """Is there a second set of rows, of the network's training set?"""

    def subset(self) -> tuple[Features, Tensor]:
        """A stratified sample in memory, with all augmented samples of every sample in it."""

    def over_rows(
        self, name: str, function: Callable[..., Any], state: Any, *, reference: bool = False
    ) -> Any:
        """The sum (by ``+``, in the order of the rows) of ``function(state, features, labels, number)`` over
        numbered parts of all rows.

        Args:
            name: of the pass, for its progress bar.
            function: of a module, found by name wherever it runs; its results and ``state`` are values that
                `salgp.io.pack` takes.
            state: given to each call.
            reference: go over the rows of the training set instead.
        """
