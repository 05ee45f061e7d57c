"""The paper's study on real data: networks, data sets, protocols, runs, tables and figures."""
