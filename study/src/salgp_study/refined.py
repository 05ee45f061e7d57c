"""A Gaussian process whose hyperparameters are searched for on a part of the samples and refined on all.

One evaluation of the evidence of 2,755 stacked rows costs as much as twenty of 1,010. So the search, with its
several starting points, sees a part of the samples; the best of them is where a short search on all samples
begins. Inference is that of `salgp.SALGP`, exact where it fits, and of all samples.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from salgp.calibrators import register
from salgp.calibrators.gp.salgp import SALGP, fit_structure, settings_of
from salgp.features import Features
from salgp_study.protocol import stratified

__all__ = ["RefinedSALGP"]


@register
@dataclass(repr=False, eq=False)
class RefinedSALGP(SALGP):
    """`salgp.SALGP` searched on ``n_search`` samples and refined on all by at most ``refine_steps``.

    Args:
        n_search: samples of the search, the same share of each class.
        refine_steps: iterations of L-BFGS on all samples; a search that would go on is reported as one that
            did not converge.

    Example:
        >>> RefinedSALGP(covariance="hl", restarts=2, n_search=100).refine_steps
        20
    """

    name: ClassVar[str] = "refined-sal-gp"

    n_search: int = 200
    refine_steps: int = 20

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        rows, _ = stratified(labels, min(1.0, self.n_search / len(labels)), self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how the last search ended is what counts
            super()._fit(features[rows], labels[rows], reference)
        settings = replace(
            settings_of(self), restarts=0, max_steps=self.refine_steps, start=self.fitted_.learned
        )
        self.fitted_ = fit_structure(self.structure_, features, labels, settings)
