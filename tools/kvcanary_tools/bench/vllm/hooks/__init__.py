"""The host's time of the plug-in's hooks, over a runner without a model."""
