# What type checkers and editors see of the names that `__init__.py` loads on first use.
from salgp import calibrators as calibrators
from salgp import decide as decide
from salgp import estimate as estimate
from salgp import export as export
from salgp import files as files
from salgp import gp as gp
from salgp import metrics as metrics
from salgp import monitor as monitor
from salgp import onnx as onnx
from salgp import plots as plots
from salgp import report as report
from salgp import sets as sets
from salgp import sklearn as sklearn
from salgp import store as store
from salgp import text as text
from salgp.calibrators.evidence.calibrator import LayerEvidence as LayerEvidence
from salgp.calibrators.gp.salgp import SALGP as SALGP
from salgp.calibrators.gp.salgp import ResidualGP as ResidualGP
from salgp.classifier import CalibratedClassifier as CalibratedClassifier
from salgp.classifier import calibrate as calibrate
from salgp.classifier import load as load
from salgp.features import Features as Features
from salgp.features import load_features as load_features
from salgp.io import FormatError as FormatError
from salgp.metrics import evaluate as evaluate
from salgp.monitor.monitor import Monitor as Monitor
from salgp.network.extract import extract as extract
from salgp.network.reader import Reader as Reader
from salgp.outputs import CalibratedOutputs as CalibratedOutputs
from salgp.outputs import calibrate_outputs as calibrate_outputs
from salgp.prediction import LayerTerms as LayerTerms
from salgp.prediction import Prediction as Prediction

__version__: str
__all__: list[str]
