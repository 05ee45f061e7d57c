# %% [markdown]
# # Tutorial: when can this network be trusted?
#
# A network has learned hand-drawn digits. It will be used on photographs of digits. We find out how far its confidence can be
# trusted there, correct it, and act on it. Every cell runs in seconds; the data are drawn, not downloaded.

# %% [markdown]
# ## 1. A trained network and three sets of data
#
# Training data, labelled samples the network was not trained on, and test data. Here is what the network was trained on, and what it
# will meet.

# %%
import torch

import salgp
from salgp import demo, plots
from salgp.demo_digits import draw_digits, photograph

train, calibration, test = draw_digits(400, seed=1), draw_digits(400, seed=2), draw_digits(800, seed=3)
field = photograph(test)
model = demo.train_network(train)

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(8, 2.2), layout="constrained")
for i, ax in enumerate(figure.subplots(2, 10).flat):
    ax.imshow((test if i < 10 else field).images[i % 10, 0], cmap="gray")
    ax.set_axis_off()
figure

# %% [markdown]
# ## 2. What its confidence is worth
#
# `extract` reads the network without changing it. On clean digits the confidence is about right. On photographs the network still
# claims to be sure, and is wrong far more often.

# %%
for name, data in {"clean": test, "photographed": field}.items():
    features, labels = salgp.extract(model, data.loader())
    right = features.correct(labels).float().mean()
    print(f"{name:12} right {right:.0%}, claims {features.confidence.mean():.0%}")

# %% [markdown]
# ## 3. Calibrate
#
# One call. It reads every layer, augments the calibration samples, and learns when to believe the
# network. Labels stay the network's own.

# %%
classifier = salgp.calibrate(model, calibration.loader(), reference=train.loader())
print(classifier.augmentation)

# %%
truth = field.labels
features, _ = classifier.extract(field.loader())
before = salgp.Prediction.from_probs(features, features.probs)
after = classifier.predict(field.loader())
temperature = (
    salgp.calibrators.get("temperature").fit(*classifier.extract(calibration.loader())).predict(features)
)
for name, prediction in {"network": before, "temperature": temperature, "salgp": after}.items():
    scores = salgp.evaluate(prediction, truth)
    print(f"{name:12} ECE {scores.ece:.3f}  NLL {scores.nll_correct:.3f}  AUROC {scores.auroc:.3f}")

# %% [markdown]
# The reliability diagram shows the same: a calibrated confidence lies on the diagonal.

# %%
plots.reliability_diagram(after.confidence, after.label == truth, n_bins=10, title="photographed, calibrated")

# %% [markdown]
# ## 4. Why was this one corrected?
#
# The terms are in confidence points and add up to the change.

# %%
most = int((before.confidence - after.confidence).argmax())
print(f"predicted {int(after.label[most])}, is {int(truth[most])}")
print(classifier.calibrator.explain(features, most))

# %% [markdown]
# ## 5. Act, or ask a human
#
# Acting on answers that are at least 90 % sure:

# %%
for name, prediction in {"network": before, "salgp": after}.items():
    act = prediction.confidence >= 0.9
    wrong = (prediction.label != truth)[act].float().mean()
    print(f"{name:8} acts on {int(act.sum()):3} of {len(truth)}, {wrong:.0%} of them wrong")

# %% [markdown]
# ## 6. Keep it
#
# One file, no pickle. Loaded with the same network, it predicts the same; with another network it refuses.

# %%
classifier.save("calibrated")
again = salgp.load("calibrated", model)
print(bool(torch.equal(again(field.images).confidence, classifier(field.images).confidence)))
