"""The rivals: every published method, behind the contract of `salgp.calibrators.base`."""
