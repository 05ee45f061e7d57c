"""What a calibrator may ask of data that does not fit into memory; feature stores answer it.

`Calibrator.fit_stream` gets such a source. A method is fitted out of core by steps whose results are kept,
and by passes over all rows, each of which adds up what the rows say. So a killed fit goes on where it
stopped, and the rows may be anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from salgp.features import Features

__all__ = ["Source"]


class Source(Protocol):
    """Labelled rows of any number."""

    inducing: str
    """Where a Gaussian process may take its inducing rows from: ``stream`` or ``subset``."""
    rounds: int
    """Most passes of an iterated fit."""
    seed: int

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def has_reference(self) -> bool:
        """Is there a second set of rows, of the network's training set?"""

    def subset(self) -> tuple[Features, Tensor]:
        """A stratified sample in memory, with all copies of every sample in it."""

    def kept(self, name: str, compute: Callable[[], Any]) -> Any:
        """The storable value called ``name``: computed now, or found where an earlier run left it."""

    def over_rows(
        self, name: str, function: Callable[..., Any], state: Any, *, reference: bool = False
    ) -> Any:
        """The sum (by ``+``, in the order of the rows) of ``function(state, features, labels, number)`` over
        numbered parts of all rows.

        Args:
            name: of the pass, under which its pieces are kept.
            function: of a module, found by name wherever it runs.
            state: storable; given to each call.
            reference: go over the rows of the training set instead.
        """
