"""A calibrated network inside a scikit-learn pipeline."""

from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from salgp.sklearn import CalibratedTorchClassifier

X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0, stratify=y)
pipeline = make_pipeline(StandardScaler(), CalibratedTorchClassifier()).fit(X_train, y_train)
print(
    f"accuracy {pipeline.score(X_test, y_test):.3f}, log loss "
    f"{log_loss(y_test, pipeline.predict_proba(X_test)):.3f}"
)
