"""Living with a fitted GP: add labelled samples, take some back, ask which to label next.

Hyperparameters stay as they are; the posterior is conditioned again on the changed data. With inducing rows
that is an addition or subtraction of summed statistics; exactly, it is a new factorisation. For a Bernoulli
likelihood the sites of the samples already known are kept, those of new samples are refined until they
settle.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from salgp.gp.fitting import Fitted
from salgp.gp.kernels import Rows, gaps, self_gaps
from salgp.gp.likelihood import Sites, bernoulli_sites, gaussian_sites
from salgp.gp.regression import Statistics, condition_exact, condition_inducing, statistics

__all__ = ["extend", "new_sites", "retract"]


def extend(fitted: Fitted, rows: Rows, sites: Sites) -> Fitted:
    """Condition on further rows."""
    p = fitted.posterior
    if fitted.summary is not None:
        return _with_summary(fitted, fitted.summary + _summary_of(fitted, rows, sites))
    assert fitted.y is not None
    assert fitted.noise is not None
    y, noise = torch.cat([fitted.y, sites.target]), torch.cat([fitted.noise, sites.noise])
    posterior = condition_exact(p.covariance, p.theta, Rows.concatenate([p.rows, rows]), y, noise)
    return replace(fitted, posterior=posterior, y=y, noise=noise)


def retract(fitted: Fitted, rows: Rows, sites: Sites) -> Fitted:
    """Condition on all but the given rows, which must be among those known."""
    p = fitted.posterior
    if fitted.summary is not None:
        if len(rows) >= fitted.summary.n:
            raise ValueError(f"cannot forget {len(rows)} rows: the calibrator knows {fitted.summary.n}")
        return _with_summary(fitted, fitted.summary - _summary_of(fitted, rows, sites))
    assert fitted.y is not None
    assert fitted.noise is not None
    keep = torch.ones(len(p.rows), dtype=torch.bool, device=fitted.y.device)
    for i in range(len(rows)):
        keep[_find(p.rows, rows[[i]], keep)] = False
    if not bool(keep.any()):
        raise ValueError("cannot forget every sample a calibrator knows")
    posterior = condition_exact(p.covariance, p.theta, p.rows[keep], fitted.y[keep], fitted.noise[keep])
    return replace(fitted, posterior=posterior, y=fitted.y[keep], noise=fitted.noise[keep])


def new_sites(
    fitted: Fitted, rows: Rows, target: Tensor, offset: Tensor | None, weight: float, rounds: int = 50
) -> Sites:
    """Sites of new samples: residuals as they are, or refined Bernoulli sites around the posterior that
    includes them.

    Args:
        fitted: current GP.
        rows: flat rows of the new samples.
        target: residuals, or correctness where ``offset`` is given.
        offset: parametric log-odds of each row, for a Bernoulli likelihood.
        weight: of each observation.
        rounds: most refinements.
    """
    if offset is None:
        return gaussian_sites(
            target, torch.tensor(fitted.log_noise, dtype=torch.float64, device=target.device), weight
        )
    mean, variance = fitted.posterior(rows)
    for _ in range(rounds):
        sites = bernoulli_sites(target, mean + offset, variance, weight)
        centred = replace(sites, target=sites.target - offset)
        before = mean
        mean, variance = extend(fitted, rows, centred).posterior(rows)
        if float((mean - before).abs().max()) < 1e-8:
            break
    return centred


def _summary_of(fitted: Fitted, rows: Rows, sites: Sites) -> Statistics:
    p = fitted.posterior
    Kuf = p.covariance(p.theta, gaps(p.rows, rows, p.covariance))
    return statistics(Kuf, p.covariance(p.theta, self_gaps(rows, p.covariance)), sites.target, sites.noise)


def _with_summary(fitted: Fitted, summary: Statistics) -> Fitted:
    p = fitted.posterior
    return replace(
        fitted, posterior=condition_inducing(p.covariance, p.theta, p.rows, summary), summary=summary
    )


def _find(known: Rows, row: Rows, keep: Tensor) -> int:
    same = keep.clone()
    for name, x in known.blocks.items():
        same &= (x == row.blocks[name].to(x.dtype)).all(-1)
    for name, g in known.groups.items():
        same &= g == row.groups[name]
    if not bool(same.any()):
        raise ValueError("a sample to forget is not among those the calibrator was fitted on")
    return int(same.nonzero()[0, 0])
