"""Gaussian process core: covariances, regression, likelihoods, optimisation. Knows neither networks nor
estimators.
"""
