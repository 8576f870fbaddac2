"""The engine: model, attention, sampling and the step that drives them."""
