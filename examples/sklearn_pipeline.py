"""A fitted scikit-learn pipeline with calibrated probabilities."""

from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from salgp.sklearn import CalibratedEstimator

X, y = load_breast_cancer(return_X_y=True)
X_train, X_rest, y_train, y_rest = train_test_split(X, y, random_state=0, stratify=y, test_size=0.6)
X_held_out, X_test, y_held_out, y_test = train_test_split(X_rest, y_rest, random_state=0, stratify=y_rest)
network = make_pipeline(StandardScaler(), MLPClassifier(max_iter=1000, random_state=0)).fit(X_train, y_train)
calibrated = CalibratedEstimator(network).fit(X_held_out, y_held_out)
for model in (network, calibrated):
    print(
        f"accuracy {model.score(X_test, y_test):.3f}, log loss "
        f"{log_loss(y_test, model.predict_proba(X_test)):.3f}"
    )
